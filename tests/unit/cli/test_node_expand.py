"""Environment and `$(VAR)` expansion follow the Kubernetes rules."""

import asyncio
from collections.abc import Mapping

import pytest

from paceline_cli.node.expand import ConfigError, container_env, expand
from paceline_cli.node.host import HostIsolation
from paceline_cli.node.pod import Container, EnvFrom, EnvVar, Pod, Port


class Content:
    """Secrets and ConfigMaps from a dict."""

    def __init__(self, objects: Mapping[str, Mapping[str, bytes]]) -> None:
        self.objects = objects

    async def secret(self, namespace: str, name: str) -> Mapping[str, bytes] | None:
        return self.objects.get(name)

    config_map = secret

    async def service_account_token(self, pod: Pod, audience: str, expiration: int) -> bytes:
        return b"token"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("x$(A)$(B)y", "x12y"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A and $(A", "$A and $(A"),
        ("100$", "100$"),
    ],
)
def test_expansion(text: str, result: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == result


def environment_of(container: Container, objects: Mapping[str, Mapping[str, bytes]]) -> dict[str, str]:
    pod = Pod("ns", "p", "u", {"app": "web"}, {"note": "n"}, "node1", "sa", (container,))
    host = HostIsolation()
    return asyncio.run(
        container_env(container, pod, host.reserve(pod), Content(objects), {"cpu": "8", "memory": "1024"})
    )


def test_order_overrides_and_references() -> None:
    container = Container(
        name="c",
        command=("x",),
        limits={"cpu": "1500m"},
        ports=(Port("http", 8000),),
        env_from=(EnvFrom("configMap", "settings", "CFG_"),),
        env=(
            EnvVar("EARLY", "$(LATE)"),
            EnvVar("LATE", "late"),
            EnvVar("AGAIN", "$(LATE)-$(PACELINE_PORT_HTTP)"),
            EnvVar("PACELINE_PORT_HTTP", "8000"),
            EnvVar("CFG_a", "env wins"),
            EnvVar("IP", source="field", ref="status.podIP"),
            EnvVar("APP", source="field", ref="metadata.labels['app']"),
            EnvVar("CPU", source="resource", ref="limits.cpu"),
            EnvVar("MEM", source="resource", ref="limits.memory"),
            EnvVar("KEY", source="secret", ref="keys", key="k"),
            EnvVar("GONE", source="secret", ref="nope", key="k", optional=True),
        ),
    )
    env = environment_of(container, {"settings": {"a": b"1", "b": b"2"}, "keys": {"k": b"s3"}})
    assert env["EARLY"] == "$(LATE)"
    port = env["PACELINE_PORT_HTTP"]
    assert port != "8000"
    assert env["AGAIN"] == f"late-{port}"
    assert (env["CFG_a"], env["CFG_b"]) == ("env wins", "2")
    assert (env["IP"], env["APP"], env["CPU"], env["MEM"], env["KEY"]) == ("127.0.0.1", "web", "2", "1024", "s3")
    assert "GONE" not in env
    assert env["PACELINE_HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    "var",
    [
        EnvVar("A", source="secret", ref="nope", key="k"),
        EnvVar("A", source="configMap", ref="there", key="nope"),
        EnvVar("A", source="field", ref="spec.nope"),
    ],
)
def test_a_missing_reference_is_named(var: EnvVar) -> None:
    with pytest.raises(ConfigError, match="nope"):
        environment_of(Container("c", ("x",), env=(var,)), {"there": {}})
