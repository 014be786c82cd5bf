"""The core's loop over the simulated device: commands, events, statistics, and tokens that no mechanism changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from driver import make, request

from paceline_engine.backends.simulated import SimulatedBackend
from paceline_engine.core.bundles import BUNDLE_TOKENS
from paceline_engine.core.outputs import StepPlan, StepResult
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.spec import SpeculationConfig
from paceline_engine.core.step_log import decoded, replay
from paceline_engine.core_process import CoreLoop
from paceline_engine.core_setup import Core
from paceline_engine.messages import (
    AbortRequest,
    Command,
    CommandResult,
    DropGrammar,
    FromCore,
    LoadGrammar,
    PrepareGrammars,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToCore,
)

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


@dataclass
class Run:
    """A core that hears `messages`, one list a step, and stops when all is done."""

    scheduler: Scheduler
    messages: list[Sequence[ToCore]]
    backend: Any = None
    overlapped: bool = False
    sent: list[StepOutputs] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        if self.backend is None:
            self.backend = SimulatedBackend(vocab_size=30, seed=1, alpha_ms=10.0, beta_ms=1.0, sleep=self._sleep)
        core = Core(
            scheduler=self.scheduler,
            backend=self.backend,
            max_model_len=64,
            namespace_digest="00" * 32,
            overlapped=self.overlapped,
        )
        self._inbox: list[ToCore] = []
        CoreLoop(core, self._receive, self._keep, clock=lambda: self.now, post=self._inbox_append).run()

    def _inbox_append(self, message: CommandResult) -> None:
        self._inbox.append(message)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _receive(self, seconds: float) -> ToCore | None:
        self.now += seconds
        if not self._inbox and self.messages:
            self._inbox = [*self.messages.pop(0), None]  # type: ignore[list-item]
        if self._inbox:
            return self._inbox.pop(0)
        return None if self.scheduler.has_work else Shutdown()

    def _keep(self, message: FromCore) -> None:
        assert isinstance(message, StepOutputs)
        self.scheduler.check_integrity()
        self.sent.append(message)

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for message in self.sent for output in message.outputs]

    @property
    def results(self) -> dict[str, CommandResult]:
        return {result.command_id: result for message in self.sent for result in message.results}

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs if output.request_id == request_id for t in output.new_token_ids]


def command(name: Any, command_id: str = "1", /, **arguments: str) -> Command:
    return Command(command_id=command_id, name=name, arguments=arguments)


@pytest.mark.parametrize("cache", [None, "hash", "radix"])
@pytest.mark.parametrize("method", ["none", "ngram", "draft"])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_no_mechanism_changes_the_tokens(cache, method, num_blocks):
    plain = Run(make(num_blocks=64, seqs=1), [[request(str(n), PROMPT[n % 3 :], 24) for n in range(5)]])
    speculation = SpeculationConfig(method=method, min_n=1)
    scheduler = make(num_blocks=num_blocks, cache=cache, speculation=speculation, seqs=4, chunk=5)
    run = Run(scheduler, [[request(str(n), PROMPT[n % 3 :], 24) for n in range(5)]])
    for name in map(str, range(5)):
        assert run.tokens(name) == plain.tokens(name)
    stats = run.sent[-1].stats
    assert (stats.num_preemptions > 0) == (num_blocks == 14)
    assert (stats.spec_accepted_tokens > 0) >= (method == "draft")
    assert (stats.prefix_hit_tokens > 0) >= (cache is not None)
    assert stats.num_free_blocks == stats.num_blocks


def test_guesses_that_are_kept_save_steps():
    steps = {
        method: Run(make(speculation=SpeculationConfig(method=method)), [[request("a", PROMPT, 24)]]).sent[-1].stats
        for method in ("none", "draft")
    }
    assert steps["draft"].num_steps < 0.6 * steps["none"].num_steps
    assert steps["draft"].spec_draft_tokens >= steps["draft"].spec_accepted_tokens > 10
    assert sum(steps["draft"].spec_accepted_per_position) == steps["draft"].spec_accepted_tokens


def test_statistics_tell_the_devices_speed():
    stats = Run(make(), [[request(str(n), [n + 1] * 16, 24) for n in range(3)]]).sent[-1].stats
    assert stats.step_alpha_seconds == pytest.approx(0.010, rel=0.01)
    assert stats.step_beta_seconds == pytest.approx(0.001, rel=0.01)
    assert stats.prefill_tokens_per_second == pytest.approx(32 / 0.042, rel=0.2)


def test_events_leave_with_the_step_that_made_them():
    run = Run(make(cache="hash"), [[request("a", PROMPT, 2)], [], [command("reset_prefix_cache")], []])
    kinds = [[event.kind for event in message.kv_events] for message in run.sent if message.kv_events]
    assert kinds == [["stored"], ["cleared"]]
    assert run.results["1"].values == {"reset": True}


def test_logprobs_of_the_simulated_device_have_the_asked_shape():
    run = Run(make(chunk=5), [[request("a", PROMPT, 4, logprobs=0, prompt_logprobs=0)]])
    assert [entry and entry.token_id for entry in run.outputs[0].prompt_logprobs] == [None, *PROMPT[1:]]
    assert [entry.token_id for output in run.outputs for entry in output.logprobs] == run.tokens("a")


def test_a_constraint_is_refused_by_a_device_without_grammars():
    load = LoadGrammar(command_id="7", grammar_id=0, grammar=b"g")
    run = Run(make(), [[PrepareGrammars(), load, DropGrammar(grammar_id=0), request("a", PROMPT, 4, grammar_id=0)]])
    assert run.results["7"].error == "this device can't follow constraints"
    assert [(o.finish_reason, o.error) for o in run.outputs] == [("error", "the simulated device knows no grammars")]


class SlowGrammars(SimulatedBackend):
    """A device that has loaded its grammars after some steps."""

    def __init__(self, loaded_after: int) -> None:
        super().__init__(vocab_size=30, seed=1, alpha_ms=1.0, beta_ms=0.0, sleep=lambda _: None)
        self.loaded_after = loaded_after
        self.grammars = self
        self.loading: list[Callable[[int, str | None], None]] = []
        self.told: list[Any] = []

    def prepare(self, vocabulary: bytes) -> None:
        self.told.append(vocabulary)

    def load(self, grammar_id: int, grammar: bytes, done: Callable[[int, str | None], None]) -> None:
        self.told.append((grammar_id, grammar))
        self.loading.append(done)

    def drop(self, grammar_id: int) -> None:
        self.told.append(grammar_id)

    def execute(self, plan: StepPlan) -> Sequence[StepResult]:
        self.loaded_after -= 1
        if self.loaded_after == 0:
            self.loading.pop()(123, None)
        return super().execute(plan)


def test_steps_go_on_while_a_grammar_is_loaded_and_its_end_is_told():
    load = LoadGrammar(command_id="7", grammar_id=3, grammar=b"g")
    messages = [[PrepareGrammars(vocabulary=b"v"), load, request("a", PROMPT, 9)], [DropGrammar(grammar_id=3)]]
    backend = SlowGrammars(loaded_after=5)
    run = Run(make(), messages, backend)
    assert backend.told == [b"v", (3, b"g"), 3]
    told = next(index for index, message in enumerate(run.sent) if message.results)
    assert run.sent[told].results == (CommandResult(command_id="7", values={"bytes": 123}),)
    assert [len(message.outputs) for message in run.sent[:told]] == [1] * 5  # A token in each step meanwhile.
    assert len(run.tokens("a")) == 9


def test_sleep_is_refused_while_requests_are_live_unless_its_level_ends_them():
    run = Run(
        make(),
        [
            [request("a", PROMPT, 30)],
            [command("sleep")],
            [command("sleep", "2", level="2"), request("late", PROMPT)],
            [command("sleep", "3"), command("wake", "4"), request("b", PROMPT, 2)],
        ],
    )
    assert "1 requests are live" in str(run.results["1"].error)
    assert run.results["2"].values == run.results["3"].values == {"asleep": True}
    ends = {o.request_id: (o.finish_reason, o.error_kind) for o in run.outputs if o.finish_reason}
    assert ends == {"a": ("abort", None), "late": ("error", "asleep"), "b": ("length", None)}
    assert [message.stats.asleep for message in run.sent].count(True) == 1


class Adapters(SimulatedBackend):
    """A simulated device that takes any adapter but "broken"."""

    held = True

    def load_adapter(self, name: str, path: str) -> str:
        if path == "broken":
            raise ValueError("no adapter_config.json in\nbroken; check the path")
        return f"digest of {path}"

    def unload_adapter(self, name: str) -> None:
        pass

    def release_kv(self) -> None:
        self.held = False

    def allocate_kv(self) -> None:
        self.held = True


def test_adapters_come_and_go():
    backend = Adapters(vocab_size=30, seed=1, alpha_ms=0, beta_ms=0, sleep=lambda _: None)
    run = Run(
        make(),
        [
            [command("load_adapter", "0", name="x", path="broken"), request("early", PROMPT, adapter="x")],
            [command("load_adapter", "1", name="x", path="p"), request("a", PROMPT, 9, adapter="x")],
            [command("unload_adapter", "2", name="x"), AbortRequest(request_id="a")],
            [command("unload_adapter", "3", name="x"), request("late", PROMPT, adapter="x")],
            [command("load_adapter", "4", name="x")],
            [command("sleep", "5")],
        ],
        backend,
    )
    assert run.results["0"].error == "no adapter_config.json in broken; check the path"
    assert run.results["1"].values == {"digest": "digest of p"}
    assert "1 requests use the adapter" in str(run.results["2"].error)
    assert run.results["3"].error is None
    assert "needs the argument 'path'" in str(run.results["4"].error)
    refused = {o.request_id for o in run.outputs if o.error_kind == "invalid"}
    assert refused == {"early", "late"}
    assert not backend.held


def test_a_device_without_adapters_says_so():
    run = Run(make(), [[command("load_adapter", name="x", path="p")]])
    assert run.results["1"].error == "this device runs no LoRA adapters"


def test_the_core_explains_itself_and_its_log_replays():
    scheduler = make(seqs=1, cache="radix", speculation=SpeculationConfig(method="ngram", min_n=1))
    run = Run(
        scheduler,
        [
            [request("a", PROMPT, 9), request("b", PROMPT, 9)],
            [command("explain", "1")],
            [command("sleep", "2", level="2"), command("wake", "3"), request("c", PROMPT, 5)],
            [],
            [command("explain", "4", log="true")],
        ],
    )
    (waiting,) = run.results["1"].values["waiting"]
    assert (waiting["request_id"], waiting["reason"], waiting["missing"]) == ("b", "seqs", 1)
    assert run.results["1"].values["num_running"] == 1
    (segment,) = decoded(run.results["4"].values["log"])
    assert len(segment.entries) > 6
    assert replay(segment) is None


def test_a_batch_that_fills_is_waited_for_not_polled():
    scheduler = make(batching="dynamic", batch_wait_s=0.3, seqs=4)
    run = Run(scheduler, [[request("a", PROMPT, 2)], []])
    assert len(run.tokens("a")) == 2
    assert len(run.sent) < 8


@pytest.mark.parametrize("method", ["none", "draft"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_bundles_say_what_single_outputs_say_in_fewer_messages(method, overlapped):
    def outputs(bundled):
        adds = [request("a", PROMPT, 40, logprobs=1, bundled=bundled), request("b", PROMPT[2:], 19, bundled=bundled)]
        scheduler = make(speculation=SpeculationConfig(method=method))
        run = Run(scheduler, [adds], overlapped=overlapped)
        return run, {name: [output for output in run.outputs if output.request_id == name] for name in "ab"}

    (plain, singles), (run, bundles) = outputs(False), outputs(True)
    for name in "ab":
        assert run.tokens(name) == plain.tokens(name)
        for field_name in ("num_draft_tokens", "num_accepted_tokens"):
            assert sum(getattr(o, field_name) for o in bundles[name]) == sum(
                getattr(o, field_name) for o in singles[name]
            )
        first, *later = bundles[name]
        assert first == singles[name][0], "the first token waits for nobody"
        assert all(len(output.new_token_ids) >= BUNDLE_TOKENS for output in later[:-1])
        # Each step's time is told: one after the first has one age, whether alone or joined.
        assert sum(len(output.ages) or 1 for output in bundles[name]) == len(singles[name])
        assert [o.finish_reason for o in bundles[name]] == [None] * len(later) + [singles[name][-1].finish_reason]
    assert [e for o in bundles["a"] for e in o.logprobs] == [e for o in singles["a"] for e in o.logprobs]
    assert len(run.sent) < 0.7 * len(plain.sent)


def test_the_ages_in_a_bundle_are_the_times_of_its_steps():
    def times(bundled):
        made: list[float] = []

        class Timed(Run):
            def _keep(self, message: FromCore) -> None:
                super()._keep(message)
                assert isinstance(message, StepOutputs)
                for output in message.outputs:
                    made.extend(self.now - age for age in output.ages or (0.0,))

        Timed(make(), [[request("a", PROMPT, 24, bundled=bundled)]])
        return made

    assert times(True) == pytest.approx(times(False))


def test_an_end_from_outside_brings_what_was_held():
    run = Run(make(), [[request("a", PROMPT, 24, bundled=True)], *[[]] * 5, [AbortRequest(request_id="a")]])
    assert [output.finish_reason for output in run.outputs] == [None, "abort"]
    assert len(run.tokens("a")) == 6
