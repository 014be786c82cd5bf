"""What the API process may ask of the core between steps, none in flight: cache reset, sleep, adapters, explanations.

A command that can't be done is answered with one line that says why; it never ends the core. What a device must be able
to do for one is a small Protocol, so a device that can't is refused by name. Imports neither tensors nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from paceline_engine.backends.base import Backend
from paceline_engine.core.scheduler import Scheduler
from paceline_engine.core.step_log import Commanded, StepLog
from paceline_engine.handoffs import Handoffs
from paceline_engine.messages import Command, CommandResult, DropGrammar, LoadGrammar, PrepareGrammars, RequestOutput
from paceline_engine.records import require_msgspec


@runtime_checkable
class ReleasesKV(Protocol):
    """A device that can give back its KV memory while nothing runs, keeping the weights."""

    def release_kv(self) -> None:
        """Free the KV pool. Nothing is scheduled until `allocate_kv`."""
        ...

    def allocate_kv(self) -> None:
        """Have the KV pool again, with any contents."""
        ...


@runtime_checkable
class LoadsAdapters(Protocol):
    """A device that runs LoRA adapters beside the model."""

    def load_adapter(self, name: str, path: str) -> str:
        """Load or replace an adapter; the digest of its content. Raises ValueError with one line."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter. Raises ValueError with one line."""
        ...


class LoadsGrammars(Protocol):
    """Loads grammars beside the steps, in a thread of its own; calls return at once."""

    def prepare(self, vocabulary: bytes) -> None:
        """Get ready, with the serialised vocabulary if there is one."""
        ...

    def load(self, grammar_id: int, grammar: bytes, done: Callable[[int, str | None], None]) -> None:
        """Load a grammar; `done` is called in that thread with its bytes in memory or why it can't be loaded."""
        ...

    def drop(self, grammar_id: int) -> None:
        """Forget a grammar."""
        ...


@runtime_checkable
class FollowsConstraints(Protocol):
    """A device whose requests can name grammars."""

    @property
    def grammars(self) -> LoadsGrammars:
        """What loads them."""
        ...


def handle_grammar(
    backend: Backend, message: PrepareGrammars | LoadGrammar | DropGrammar, post: Callable[[CommandResult], None]
) -> None:
    """Pass on what concerns grammars. post: takes a LoadGrammar's result, in any thread."""
    if not isinstance(backend, FollowsConstraints):
        if isinstance(message, LoadGrammar):
            post(CommandResult(command_id=message.command_id, error="this device can't follow constraints"))
        return
    match message:
        case PrepareGrammars():
            backend.grammars.prepare(message.vocabulary)
        case LoadGrammar(command_id=command_id):
            backend.grammars.load(
                message.grammar_id,
                message.grammar,
                lambda num_bytes, error: post(
                    CommandResult(command_id=command_id, values={"bytes": num_bytes}, error=error)
                ),
            )
        case DropGrammar():
            backend.grammars.drop(message.grammar_id)


class Commands:
    """Carries commands out on one scheduler and its device. explain_stored: what was decided, by request id."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        log: StepLog,
        handoffs: Handoffs,
        explain_stored: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._explain_stored = explain_stored
        self._scheduler = scheduler
        self._backend = backend
        self._log = log
        self._handoffs = handoffs

    def run(self, command: Command, now: float) -> tuple[CommandResult, list[RequestOutput]]:
        """The command's answer, and the terminal outputs of requests that it ended."""
        outputs: list[RequestOutput] = []
        try:
            values = self._run(command.name, command.arguments, outputs, now)
        except ValueError as error:
            return CommandResult(command_id=command.command_id, error=" ".join(str(error).split())), outputs
        return CommandResult(command_id=command.command_id, values=values), outputs

    def _run(self, name: str, arguments: Mapping[str, str], outputs: list[RequestOutput], now: float) -> dict[str, Any]:
        match name:
            case "reset_prefix_cache":
                self._log.commanded(Commanded("reset_prefix_cache"))
                # First, so that what is lent later is taken back, and what was lent before is in the tier to be erased.
                self._handoffs.reset()
                self._scheduler.reset_prefix_cache()
                return {"reset": True}
            case "sleep":
                outputs += self._sleep(arguments.get("level", "1"), now)
                return {"asleep": True}
            case "wake":
                self._wake()
                return {"asleep": False}
            case "load_adapter":
                return {"digest": self._load_adapter(_needed(arguments, "name"), _needed(arguments, "path"))}
            case "unload_adapter":
                self._unload_adapter(_needed(arguments, "name"))
                return {}
            case "explain":
                return self._explain(arguments, now)
            case _:
                raise ValueError(f"the core knows no command {name!r}")

    def _explain(self, arguments: Mapping[str, str], now: float) -> dict[str, Any]:
        """Who runs, why others wait, what is stored of them, and what became of the latest hand-offs.

        With log=true also the step log, for `core.step_log.replay`.
        """
        to_builtins = require_msgspec("an explanation").to_builtins
        live = set(self._scheduler.live_ids())
        values: dict[str, Any] = {
            "stored": {name: text for name, text in self._explain_stored().items() if name in live},
            "num_running": self._scheduler.num_running,
            "running": self._scheduler.running_ids(),
            "waiting": to_builtins(self._scheduler.why_waiting(now)),
            "handoffs": to_builtins(self._handoffs.recent),
        }
        if arguments.get("log") == "true":
            values["log"] = self._log.encoded()
        return values

    def _sleep(self, level: str, now: float) -> list[RequestOutput]:
        """Level 1 is refused while requests are live, level 2 ends them first."""
        if level not in ("1", "2"):
            raise ValueError(f"sleep level must be 1 or 2, not {level!r}")
        if self._scheduler.arrivals.asleep:
            return []
        live = self._scheduler.num_running + self._scheduler.num_waiting
        if live and level == "1":
            raise ValueError(f"{live} requests are live; wait for them, or sleep at level 2, which ends them")
        self._log.commanded(Commanded("sleep"))
        outputs = self._scheduler.sleep()
        self._handoffs.reset()
        # The device drops the rows of requests that were ended before it loses their blocks.
        plan = self._scheduler.schedule(now)
        self._log.planned(now, plan)
        results = tuple(self._backend.execute(plan))
        self._log.updated(results, now)
        self._scheduler.update(plan, results, now)
        if isinstance(self._backend, ReleasesKV):
            self._backend.release_kv()
        return outputs

    def _wake(self) -> None:
        if self._scheduler.arrivals.asleep:
            if isinstance(self._backend, ReleasesKV):
                self._backend.allocate_kv()
            self._log.commanded(Commanded("wake"))
            self._scheduler.wake()

    def _load_adapter(self, name: str, path: str) -> str:
        if not isinstance(self._backend, LoadsAdapters):
            raise ValueError("this device runs no LoRA adapters")
        self._remove_adapter(name)  # A live request must not change weights halfway.
        digest = self._backend.load_adapter(name, path)
        self._log.commanded(Commanded("set_adapter", name, digest))
        self._scheduler.arrivals.set_adapter(name, digest)
        return digest

    def _unload_adapter(self, name: str) -> None:
        if not isinstance(self._backend, LoadsAdapters):
            raise ValueError("this device runs no LoRA adapters")
        self._remove_adapter(name)
        self._backend.unload_adapter(name)

    def _remove_adapter(self, name: str) -> None:
        self._scheduler.arrivals.remove_adapter(name)
        self._log.commanded(Commanded("remove_adapter", name))


def _needed(arguments: Mapping[str, str], name: str) -> str:
    value = arguments.get(name, "")
    if not value:
        raise ValueError(f"the command needs the argument {name!r}")
    return value
