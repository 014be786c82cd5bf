"""Constraints on the tiny model: every output follows its grammar, in any batch, whatever is guessed or preempted."""

from __future__ import annotations

import re
import subprocess
import sys
from queue import Queue
from threading import Event

import numpy as np
import pytest
from tiny_grammars import EOS, WORDS, Compiler

from paceline_engine.core.outputs import AdmittedRequest, ScheduledRequest, StepPlan
from paceline_engine.core_grammars import Constraint
from paceline_engine.grammar import Grammars
from paceline_engine.messages import SamplingParams
from paceline_engine.sampling.row import RowError


def allowed(state, vocab_size: int) -> set[int]:
    values = np.zeros(vocab_size, dtype=np.float32)
    state.restrict(values)
    return set(np.flatnonzero(values == 0).tolist())


def ends(state, vocab_size: int) -> set[int]:
    return allowed(state, vocab_size) & {*EOS, 5}


def test_a_grammar_ends_only_where_it_may_and_at_every_ending_token(compiler):
    digits = compiler.matcher(compiler.regex("[0-9]{2,3}"), (), ())
    size = compiler.vocab_size
    one = compiler.ids("1")[0]
    assert ends(digits, size) == set()
    assert not digits.push(EOS[0])
    assert digits.push(one)
    assert ends(digits, size) == set()
    assert digits.push(one)
    assert ends(digits, size) == set(EOS)
    assert digits.push(one)
    assert allowed(digits, size) == set(EOS)
    assert digits.push(EOS[1])
    assert allowed(digits, size) == set(EOS)  # Nothing comes behind an end but ends.
    assert not digits.push(one)


def test_a_requests_own_stop_token_waits_for_the_grammar_though_it_is_a_word_of_it(compiler):
    nine = compiler.ids("9")[0]
    state = compiler.matcher(compiler.regex("[0-9]{2}"), (nine,), ())
    digits = set(compiler.ids("012345678"))
    assert allowed(state, compiler.vocab_size) - {WORDS.index("12")} == digits
    assert state.push(compiler.ids("3")[0])
    assert allowed(state, compiler.vocab_size) == digits
    assert state.push(compiler.ids("4")[0])
    assert allowed(state, compiler.vocab_size) == {nine, *EOS}


def test_states_move_back_over_words_and_ends(compiler):
    state = compiler.matcher(compiler.regex("a(bc)*d"), (), ())
    size = compiler.vocab_size
    seen = [allowed(state, size)]
    for token_id in [*compiler.ids("abcd"), EOS[0], EOS[1]]:
        assert state.push(token_id)
        seen.append(allowed(state, size))
    for count in range(1, len(seen)):
        state.pop(1)
        assert allowed(state, size) == seen[-1 - count]
    for token_id in [*compiler.ids("abcd"), EOS[0]]:
        assert state.push(token_id)
    state.pop(4)
    assert allowed(state, size) == seen[1]


def test_forced_tokens_spell_what_must_come_and_the_end(compiler):
    schema = (
        '{"type":"object","properties":{"name":{"type":"boolean"}},"required":["name"],"additionalProperties":false}'
    )
    state = compiler.matcher(compiler.schema(schema), (), ())
    size = compiler.vocab_size
    before = allowed(state, size)
    forced = state.forced_tokens(32)
    assert compiler.text(forced) == '{"name": '
    assert allowed(state, size) == before
    assert state.forced_tokens(2) == forced[:2]
    for token_id in [*forced, *compiler.ids("f")]:
        assert state.push(token_id)
    assert compiler.text(state.forced_tokens(32)) == "alse}</s>"
    for token_id in compiler.ids("alse}"):
        assert state.push(token_id)
    assert state.forced_tokens(32) == [EOS[0]]
    assert state.push(EOS[0])
    assert state.forced_tokens(32) == []


def loaded(grammars: Grammars, grammar_id: int, grammar: bytes) -> tuple[int, str | None]:
    """Load it, and wait for what is told."""
    told: Queue[tuple[int, str | None]] = Queue()
    grammars.load(grammar_id, grammar, lambda num_bytes, error: told.put((num_bytes, error)))
    return told.get(timeout=60)


def test_requests_share_a_grammar_and_masks_and_one_whose_grammar_was_dropped_goes_on(compiler):
    grammars = compiler.grammars()
    num_bytes, error = loaded(grammars, 7, compiler.regex("a+").grammar)
    assert (num_bytes > 0, error) == (True, None)
    states = [grammars.matcher(7, (), ()) for _ in range(5)]
    assert (grammars.stats.loaded, grammars.stats.waited) == (1, 0)
    for state in states:
        allowed(state, compiler.vocab_size)
    assert (grammars.stats.masks_built, grammars.stats.masks_shared) == (1, 4)
    grammars.drop(7)
    assert len(grammars) == 0
    assert states[0].push(compiler.ids("a")[0])
    with pytest.raises(RowError, match="was not sent before it"):
        grammars.matcher(7, (), ())
    assert grammars.stats.mask_build_seconds > 0
    assert grammars.stats.state_update_seconds > 0


def test_a_request_that_comes_before_its_grammar_is_loaded_waits_for_it(compiler):
    grammars = compiler.grammars()
    hold = Event()

    def hold_until_somebody_waits() -> None:
        while grammars.stats.waited == 0 and not hold.wait(0.001):
            pass

    grammars._in_background().submit(hold_until_somebody_waits)
    grammars.load(0, compiler.regex("a+").grammar, lambda num_bytes, error: None)
    assert len(grammars) == 1
    assert grammars.matcher(0, (), compiler.ids("aa"))
    assert grammars.stats.waited == 1


def test_loading_needs_the_vocabulary_and_says_so(compiler):
    grammars = Grammars(compiler.vocab_size, EOS)
    grammars.prepare(b"")
    assert "the vocabulary didn't come before it" in str(loaded(grammars, 0, compiler.regex("a+").grammar)[1])
    grammars.prepare(compiler.info.serialize_json().encode())
    assert loaded(grammars, 1, compiler.regex("a+").grammar)[1] is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b"[1, 2", "cut", "another vocabulary"])
def test_damaged_grammars_are_one_requests_error(compiler, damage):
    good = compiler.regex("a+").grammar
    if damage == "cut":
        damage = good[: len(good) // 2]
    elif damage == "another vocabulary":
        damage = Compiler(compiler.vocab_size + 1).regex("a+").grammar
    grammars = compiler.grammars()
    num_bytes, error = loaded(grammars, 0, damage)
    assert "the request's compiled grammar can't be loaded" in str(error)
    assert num_bytes == 0
    with pytest.raises(RowError, match="the request's compiled grammar can't be loaded"):
        grammars.matcher(0, (), ())


def test_output_that_breaks_the_grammar_is_refused(compiler):
    with pytest.raises(RowError, match="doesn't follow"):
        compiler.matcher(compiler.regex("a+"), (), compiler.ids("ab"))


PATTERNS = ["[a-z]{14,19}", '\\{"name": (true|false|12)\\}', "(ab|cd){7,}end", "[0-9]+(\\.[0-9]{1,3})?", "x"]


def run(ending, new_loop, compiler, prompts, *, forced=True, **options):
    """Texts and steps of constrained requests beside a free one; greedy and sampled in turn."""
    loop = new_loop(ending, grammars=compiler.grammars(), **options)
    if not forced:
        loop.runner._grammars.matcher = _without_forced(loop.runner._grammars.matcher)
    for i, prompt in enumerate(prompts):
        constraint = compiler.regex(PATTERNS[i % len(PATTERNS)]) if i < 2 * len(PATTERNS) else None
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        loop.add(str(i), prompt, 24, constraint=constraint, **sampling)
    return loop.run(), loop


def _without_forced(make):
    def matcher(*arguments):
        state = make(*arguments)
        state.forced_tokens = lambda limit: []
        return state

    return matcher


@pytest.fixture(scope="module")
def prompts(tiny, prompts_for):
    return prompts_for(11, tiny.config.vocab_size, seed=2, longest=20)


def test_outputs_follow_their_grammars_alike_alone_preempted_and_without_guesses(ending, new_loop, compiler, prompts):
    texts, loop = run(ending, new_loop, compiler, prompts)
    for i in range(2 * len(PATTERNS)):
        text = compiler.text(texts[str(i)])
        if loop.finished[str(i)].finish_reason == "stop":
            assert re.fullmatch(PATTERNS[i % len(PATTERNS)] + "(</s>|<\\|end\\|>)", text), text
        else:
            assert loop.finished[str(i)].finish_reason == "length"
    assert loop.finished["1"].finish_reason == "stop"
    free, _ = run(ending, new_loop, compiler, prompts, forced=False)
    assert free == texts
    preempted, small = run(ending, new_loop, compiler, prompts, num_blocks=11)
    assert small.scheduler.num_preemptions > 0
    assert preempted == texts
    alone, _ = run(ending, new_loop, compiler, prompts, max_num_seqs=1)
    assert alone == texts


def test_a_request_without_constraint_is_untouched_by_constrained_neighbours(tiny, ending, new_loop, compiler, prompts):
    texts, _ = run(ending, new_loop, compiler, prompts)
    assert texts["10"] == tiny.reference_tokens(prompts[10], 24)


def test_forced_tokens_cost_one_step(ending, new_loop, compiler):
    def steps(forced: bool) -> int:
        loop = new_loop(ending, grammars=compiler.grammars())
        if not forced:
            loop.runner._grammars.matcher = _without_forced(loop.runner._grammars.matcher)
        loop.add("a", [5, 6, 7], 40, constraint=compiler.regex("a long constant text[0-9]"))
        count = 0
        while loop.scheduler.has_work:
            loop.step()
            count += 1
        assert compiler.text(loop.tokens["a"])[:-6].startswith("a long constant tex")
        return count

    # A prefill, the guesses, the digit and its end as a guess.
    assert steps(forced=True) <= 5
    assert steps(forced=False) > 15


def test_text_that_is_forced_without_end_is_guessed_within_the_limit(compiler):
    state = compiler.matcher(compiler.ebnf('root ::= "a" root'), (), ())
    assert compiler.text(state.forced_tokens(8)) == "a" * 8
    assert allowed(state, compiler.vocab_size) == {compiler.ids("a")[0]}


def test_a_grammar_whose_work_explodes_fails_alone_as_the_clients_fault(ending, new_loop, compiler):
    loop = new_loop(ending, grammars=compiler.grammars())
    loop.add("bad", [1, 2, 3], 64, constraint=compiler.ebnf('root ::= (("a"{1,500}){1,500}){1,500}'), min_tokens=64)
    loop.add("good", [1, 2, 3], 32, constraint=compiler.regex("[ab]{30}"))
    loop.run()
    assert (loop.finished["bad"].finish_reason, loop.finished["bad"].error_kind) == ("error", "invalid")
    assert "grammar takes too long" in loop.finished["bad"].error
    assert loop.finished["good"].finish_reason == "stop"


def test_rules_that_leave_no_token_are_the_clients_fault(ending, new_loop, compiler):
    loop = new_loop(ending, grammars=compiler.grammars())
    (banned,) = compiler.ids("a")
    loop.add("bad", [1, 2, 3], 8, constraint=compiler.regex("[a]{4}"), bad_words=((banned,),))
    loop.run()
    assert (loop.finished["bad"].finish_reason, loop.finished["bad"].error_kind) == ("error", "invalid")
    assert "exclude each other" in loop.finished["bad"].error


def test_a_damaged_grammar_fails_alone(ending, new_loop, compiler):
    loop = new_loop(ending, grammars=compiler.grammars())
    loop.add("bad", [1, 2, 3], 8, constraint=Constraint(key="bad", grammar=b"nonsense"))
    loop.add("good", [1, 2, 3], 8, constraint=compiler.regex("[ab]{4}"))
    loop.run()
    assert loop.finished["bad"].finish_reason == "error"
    assert "can't be loaded" in loop.finished["bad"].error
    assert loop.finished["good"].finish_reason == "stop"


def test_a_device_without_a_vocabulary_says_so(tiny, new_loop):
    loop = new_loop(tiny)
    loop.runner.execute(
        StepPlan(
            admitted=(
                AdmittedRequest(
                    request_id="a",
                    token_ids=(1,),
                    num_prompt_tokens=1,
                    sampling=SamplingParams(max_tokens=2),
                    grammar_id=0,
                ),
            ),
        )
    )
    share = ScheduledRequest(request_id="a", token_ids=[1], start=0, new_block_ids=[0], sample=True)
    [result] = loop.runner.execute(StepPlan(scheduled=(share,)))
    assert "can't follow constraints" in result.error


def test_constraints_load_neither_transformers_nor_anything_before_they_are_used():
    code = (
        "import sys, paceline_engine.backends.cpu\n"
        "assert 'xgrammar' not in sys.modules\n"
        "from paceline_engine.grammar import import_xgrammar\n"
        "info = import_xgrammar().TokenizerInfo(['a', 'b'], stop_token_ids=[1])\n"
        "assert 'transformers' not in sys.modules\n"
        "assert import_xgrammar().GrammarMatcher(import_xgrammar().GrammarCompiler(info).compile_regex('a+'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
