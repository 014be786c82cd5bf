"""The compile worker: a process of its own that a bad grammar can't take anything else down with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline_engine.structured import source as sources
from paceline_engine.structured.compiler import CompilerBusy, CompileRefused, CompilerFailed, GrammarCompiler
from paceline_engine.structured.source import GrammarSource
from paceline_engine.structured.worker import Setup

REGEX = GrammarSource(kind="regex", text="[a-c]+")
# Answers the setup, then nothing; or nothing at all; or the setup, then ends.
_READ = "import sys; n = int.from_bytes(sys.stdin.buffer.read(4), 'little'); sys.stdin.buffer.read(n);"
_ANSWER = "b = b'\\x80'; sys.stdout.buffer.write(len(b).to_bytes(4, 'little') + b); sys.stdout.flush();"
HANGS = (sys.executable, "-c", f"{_READ} {_ANSWER} sys.stdin.buffer.read()")
MUTE = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
# Compiles anything into the same grammar.
_GRAMMAR = "b = bytes([130, 167]) + b'grammar' + bytes([196, 3]) + b'gra' + bytes([165]) + b'error' + bytes([192]);"
_REPLY = "sys.stdout.buffer.write(len(b).to_bytes(4, 'little') + b); sys.stdout.flush()"
ECHOES = (sys.executable, "-c", f"{_READ} {_ANSWER} {_GRAMMAR}\nwhile True:\n  {_READ} {_REPLY}")
DIES = (sys.executable, "-c", f"{_READ} {_ANSWER} sys.stdin.buffer.read(4)")


def run(setup: Setup, work: Callable[[GrammarCompiler], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        compiler = GrammarCompiler(setup, "digest", **({"time_limit": 30.0} | options))
        try:
            return await work(compiler)
        finally:
            await compiler.close()

    return asyncio.run(main())


def test_equal_sources_are_compiled_once_and_faults_are_told(setup: Setup, grammars: Any) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        one, same, other = await asyncio.gather(
            compiler.compile(REGEX), compiler.compile(REGEX), compiler.compile(sources.choice(["yes", 'n"o\n']))
        )
        assert one is same is await compiler.compile(REGEX)
        assert one.key != other.key
        assert compiler.num_compiled == 2
        for kind, text in [("regex", "a("), ("grammar", "root ::= other"), ("grammar", "root ::= root")]:
            with pytest.raises(CompileRefused):
                await compiler.compile(GrammarSource(kind=kind, text=text))  # type: ignore[arg-type]
        with pytest.raises(CompileRefused):
            await compiler.compile(sources.structural_tag({"type": "nonsense"}))
        assert await compiler.compile(GrammarSource(kind="regex", text="b+"))

    run(setup, work)
    assert grammars.accepted(sources.choice(["yes", 'n"o\n']), ["yes", 'n"o\n', "no"]) == {"yes", 'n"o\n'}


def test_a_compilation_that_takes_too_long_ends_with_its_process(setup: Setup) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for _ in range(2):
            with pytest.raises(CompileRefused, match=r"longer than 0\.2 s"):
                await compiler.compile(REGEX)

    run(setup, work, time_limit=0.2, command=HANGS)


def test_a_worker_that_dies_over_a_grammar_is_started_again(setup: Setup) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for _ in range(2):
            with pytest.raises(CompileRefused, match="broke down"):
                await compiler.compile(REGEX)

    run(setup, work, command=DIES)


def test_a_worker_that_does_not_start_is_our_fault(setup: Setup) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        with pytest.raises(CompilerFailed):
            await compiler.compile(REGEX)

    run(setup, work, command=MUTE, start_limit=0.2)


def test_waiting_compilations_are_bounded_and_a_client_that_leaves_ends_none(setup: Setup) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        first = asyncio.create_task(compiler.compile(REGEX))
        await asyncio.sleep(0)
        with pytest.raises(CompilerBusy):
            await compiler.compile(GrammarSource(kind="regex", text="x"))
        first.cancel()
        with pytest.raises(CompileRefused, match="longer"):
            await compiler.compile(REGEX)

    run(setup, work, time_limit=0.5, command=HANGS, max_waiting=1)


def test_the_cache_is_bounded_in_bytes(setup: Setup) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(REGEX)
        await compiler.compile(REGEX)
        assert compiler.num_compiled == 2

    run(setup, work, max_cache_bytes=2, command=ECHOES)


def test_a_tool_call_is_forced_into_its_format(grammars: Any) -> None:
    from paceline_engine.tools.grammar import forced_calls, free_calls

    schema = {"type": "object", "properties": {"c": {"type": "string", "pattern": "^a+$"}}, "required": ["c"]}
    call = '<tool_call>\n{"name": "f", "arguments": {"c": "aa"}}\n</tool_call>'
    wrong = call.replace("aa", "ab")
    one = sources.structural_tag(forced_calls("hermes", [("f", schema)], several=False))
    assert grammars.accepted(one, [call, wrong, f"{call}\n{call}", "", f"hi {call}"]) == {call}
    several = sources.structural_tag(forced_calls("hermes", [("f", schema)], several=True))
    assert grammars.accepted(several, [call, f"{call}\n{call}", ""]) == {call, f"{call}\n{call}"}
    free = sources.structural_tag(free_calls("hermes", [("f", schema)]))
    assert grammars.accepted(free, [call, wrong, "hi", f"hi {call}"]) == {call, "hi", f"hi {call}"}
    llama = sources.structural_tag(forced_calls("llama3_json", [("f", schema)], several=True))
    body = '{"name": "f", "parameters": {"c": "a"}}'
    assert grammars.accepted(llama, [body, f"{body}; {body}", "{}"]) == {body, f"{body}; {body}"}
