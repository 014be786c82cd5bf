"""The operator as a process: what it imports, what it registers with kopf, how it refuses to start, its probes."""

import subprocess
import sys
import urllib.error
import urllib.request

import kopf
import pytest

from paceline_api.kube import SECRET
from paceline_operator.feed import CHILD_KINDS, OWN_KINDS, WATCHED_KINDS, field_selector, label_selector
from paceline_operator.handlers import KopfInformer, kopf_settings, registry_for
from paceline_operator.probes import HealthServer


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline_operator.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )


def test_the_process_never_imports_torch_or_the_engine():
    code = (
        "import sys, paceline_operator.cli, paceline_operator.handlers\n"
        "bad = {name.split('.')[0] for name in sys.modules} "
        "& {'torch', 'triton', 'transformers', 'paceline_engine', 'paceline_router', 'numpy'}\n"
        "sys.exit(str(sorted(bad)) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_flag_with_its_default():
    done = command("--help")
    assert done.returncode == 0
    for flag in ("--namespace", "--kubeconfig", "--metrics-port", "--health-port", "--image-engine", "--leader-elect"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kubeconfig", "/no/such/file"], "/no/such/file: there is no such file"),
        (["--informer", "carrier-pigeon"], "use kopf or watch"),
        ([], "pass --kubeconfig FILE or run inside a pod"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, says):
    done = command(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["garbage: [", "- 1", "", "5"])
def test_a_file_that_is_no_kubeconfig_is_named_in_one_line(tmp_path, text):
    path = tmp_path / "config"
    path.write_text(text)
    done = command("--kubeconfig", str(path))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no cluster configuration" in line
    assert str(path) in line


def test_an_api_server_that_is_not_there_is_one_line_and_exit_code_2(tmp_path):
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
    )
    done = command("--kubeconfig", str(kubeconfig))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "cannot reach the Kubernetes API" in line


def test_kopf_gets_event_handlers_only():
    registry = registry_for(lambda *_: None, None)
    assert len(registry._watching._handlers) == len(WATCHED_KINDS)
    for other in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not list(other._handlers), "change handlers, timers and daemons write to users' objects"


def test_kopf_settings_bound_every_wait_and_post_nothing():
    settings = kopf_settings()
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert settings.queueing.worker_limit is None
    assert settings.watching.client_timeout > settings.watching.server_timeout > 0
    assert settings.process.ultimate_exiting_timeout is None, "kopf would kill the process without a word"
    assert isinstance(settings, kopf.OperatorSettings)


def test_only_what_paceline_manages_is_watched_except_for_the_users_own_kinds():
    assert {label_selector(kind) for kind in OWN_KINDS} == {""}
    assert {label_selector(kind) for kind in CHILD_KINDS} == {"app.kubernetes.io/managed-by=paceline"}
    assert field_selector(SECRET) == "metadata.name=paceline-internal"
    assert {field_selector(kind) for kind in WATCHED_KINDS if kind != SECRET} == {""}
    settings = kopf_settings()
    assert list(settings.watching.field_selectors.values()) == ["metadata.name=paceline-internal"]


def test_the_informer_runs_for_a_user_without_a_name(monkeypatch):
    """In an image the user is a number only; kopf must not look it up."""
    import getpass

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    asked: dict[str, object] = {}

    async def spawn_tasks(**options: object) -> list[object]:
        asked.update(options)
        return []

    async def run_tasks(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(kopf, "spawn_tasks", spawn_tasks)
    monkeypatch.setattr(kopf, "run_tasks", run_tasks)
    informer = KopfInformer("models", lambda *_: None)
    informer.start()
    informer.stop(5.0)
    assert asked["identity"] == "paceline.dev"
    assert asked["namespaces"] == ["models"]
    assert not informer.alive


def test_probes_answer_with_the_reason():
    problems: list[str | None] = [None]
    server = HealthServer("127.0.0.1", 0, lambda: problems[0], lambda: None)
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health/live", timeout=30) as answer:
            assert answer.status == 200
        problems[0] = "thread reconcile-0 has made no progress for 130 s"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health/live", timeout=30)
        assert refused.value.code == 503
        assert b"no progress" in refused.value.read()
        refused.value.close()
    finally:
        server.stop()
