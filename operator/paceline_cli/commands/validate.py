"""`paceline validate`: every problem of every file, with line and field, without touching a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline_api.v1alpha1 import Resource
from paceline_cli.checks import check_objects
from paceline_cli.errors import EXIT_BAD_INPUT, EXIT_DONE, BadInput
from paceline_cli.inputs import Finding, Loaded, SourceObject, UnreadableFiles, load
from paceline_cli.references import reference_warnings


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the files say and what is wrong with it. Valid if there are no problems and at least one object."""

    objects: list[SourceObject]
    typed: list[tuple[SourceObject, Resource]]
    problems: list[Finding]
    warnings: list[Finding]


def judge(loaded: Loaded) -> Verdict:
    """Problems in the order of files and lines."""
    typed, problems = check_objects(loaded.objects)
    order = {file: index for index, file in enumerate(loaded.files)}
    everything = loaded.problems + problems
    everything += [Finding(f, 1, 1, "", "", "holds no object; is it the right file?") for f in _empty_files(loaded)]
    everything.sort(key=lambda finding: (order[finding.file], finding.line, finding.column))
    return Verdict(loaded.objects, typed, everything, reference_warnings(loaded.objects, typed))


def _empty_files(loaded: Loaded) -> list[str]:
    spoken_of = {item.file for item in loaded.objects} | {problem.file for problem in loaded.problems}
    return [file for file in loaded.files if file not in spoken_of]


def load_valid(files: Sequence[str]) -> Verdict:
    """For commands that go on with the objects: raises BadInput with every problem, writes warnings to stderr."""
    verdict = judge(load(files))
    if verdict.problems:
        raise BadInput(*map(str, verdict.problems))
    for warning in verdict.warnings:
        sys.stderr.write(f"paceline: warning: {warning}\n")
    return verdict


def run(files: Sequence[str], *, as_json: bool) -> int:
    """The exit code; findings go to stderr, or as one JSON object to stdout."""
    try:
        loaded = load(files)
    except UnreadableFiles as unreadable:
        if not as_json:
            raise
        _write_json(Verdict([], [], unreadable.problems, []))
        return EXIT_BAD_INPUT
    verdict = judge(loaded)
    if as_json:
        _write_json(verdict)
    else:
        _write(loaded, verdict)
    return EXIT_BAD_INPUT if verdict.problems else EXIT_DONE


def _write(loaded: Loaded, verdict: Verdict) -> None:
    for problem in verdict.problems:
        sys.stderr.write(f"paceline: {problem}\n")
    for warning in verdict.warnings:
        sys.stderr.write(f"paceline: warning: {warning}\n")
    wrong = {problem.file for problem in verdict.problems}
    for file in loaded.files:
        if file not in wrong:
            labels = [item.label for item in loaded.objects if item.file == file]
            sys.stdout.write(f"{file}: valid: {', '.join(labels)}\n")


def _write_json(verdict: Verdict) -> None:
    report = {
        "valid": not verdict.problems,
        "objects": [
            {
                "file": item.file,
                "line": item.line,
                "apiVersion": item.manifest.get("apiVersion"),
                "kind": item.kind,
                "namespace": item.namespace,
                "name": item.name,
            }
            for item in verdict.objects
        ],
        "problems": [asdict(problem) for problem in verdict.problems],
        "warnings": [asdict(warning) for warning in verdict.warnings],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
