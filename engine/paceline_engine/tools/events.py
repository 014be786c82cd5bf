"""What a tool-call parser finds. Joined over a whole answer, the events are the same however the text was cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of `name` begins; `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of a call's arguments, which together are a JSON object as the model wrote it."""

    index: int
    text: str


Event = Content | CallBegin | CallArguments


class ToolParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Event]:
        """Events that became certain with this text."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, once the answer has ended."""
        ...


def joined(events: list[Event]) -> list[Event]:
    """The same events with neighbours of a kind joined and empty text dropped."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, Content) and isinstance(last, Content):
            made[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            made[-1] = CallArguments(event.index, last.text + event.text)
        elif isinstance(event, CallBegin) or event.text:
            made.append(event)
    return made
