"""The reflector hands over every change exactly once, through gaps and failures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline_api.kube import POD, Expired, KubeError, Manifest, ObjectList, WatchEvent
from paceline_kube import Reflector


def pod(name: str, version: int) -> Manifest:
    return {"metadata": {"name": name, "namespace": "n", "resourceVersion": str(version)}}


class ScriptedApi:
    """Answers list and watch from scripts; a watch without a script blocks until the test ends."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = iter(lists), iter(watches)
        self.watched_from: list[str] = []
        self.done = threading.Event()

    def list(self, *_: Any, **__: Any) -> ObjectList:
        answer = next(self.lists)
        if isinstance(answer, Exception):
            raise answer
        return ObjectList(answer, "10")

    def watch(self, *_: Any, resource_version: str, **__: Any) -> Iterator[WatchEvent]:
        self.watched_from.append(resource_version)
        for event in next(self.watches, []):
            if isinstance(event, Exception):
                raise event
            yield event
        if not self.watches.__length_hint__():
            self.done.wait(10)


Events = queue.Queue[tuple[str, str]]


@pytest.fixture
def events() -> Events:
    return queue.Queue()


def follow(api: ScriptedApi, events: Events) -> Reflector:
    def handler(kind: str, item: Manifest) -> None:
        events.put((kind, item["metadata"]["name"]))

    return Reflector(api, POD, "n", handler).start()  # pyright: ignore[reportArgumentType]


def take(events: Events, count: int) -> list[tuple[str, str]]:
    return [events.get(timeout=10) for _ in range(count)]


def test_list_then_watch(events: Events) -> None:
    api = ScriptedApi([[pod("a", 1)]], [[WatchEvent("ADDED", pod("b", 11)), WatchEvent("DELETED", pod("a", 12))]])
    reflector = follow(api, events)
    assert take(events, 3) == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]
    assert reflector.wait_synced(1)
    reflector.stop()
    api.done.set()


def test_deleted_during_a_gap_arrives_as_deleted(events: Events) -> None:
    gone = Expired(410, "Expired", "too old")
    api = ScriptedApi([[pod("a", 1), pod("b", 2)], [pod("b", 2), pod("c", 20)]], [[gone], []])
    reflector = follow(api, events)
    assert take(events, 4) == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("ADDED", "c")]
    reflector.stop()
    api.done.set()


def test_an_unchanged_object_is_not_handed_over_again(events: Events) -> None:
    api = ScriptedApi(
        [[pod("a", 1)], [pod("a", 1)], [pod("a", 3)]], [[Expired(410, "", "")], [Expired(410, "", "")], []]
    )
    reflector = follow(api, events)
    assert take(events, 2) == [("ADDED", "a"), ("MODIFIED", "a")]
    assert events.empty()
    reflector.stop()
    api.done.set()


def test_a_watch_that_ends_goes_on_from_the_last_version(events: Events) -> None:
    api = ScriptedApi([[]], [[WatchEvent("ADDED", pod("a", 15))], [WatchEvent("ADDED", pod("b", 16))], []])
    reflector = follow(api, events)
    assert take(events, 2) == [("ADDED", "a"), ("ADDED", "b")]
    assert api.watched_from[:2] == ["10", "15"]
    reflector.stop()
    api.done.set()


def test_a_failing_list_is_tried_again(events: Events) -> None:
    api = ScriptedApi([KubeError(500, "Internal", "no"), [pod("a", 1)]], [[]])
    reflector = follow(api, events)
    assert take(events, 1) == [("ADDED", "a")]
    reflector.stop()
    api.done.set()


def test_a_failing_handler_gets_the_object_again() -> None:
    seen: queue.Queue[str] = queue.Queue()

    def handler(kind: str, item: Manifest) -> None:
        seen.put(kind)
        if seen.qsize() == 1:
            raise RuntimeError("first time")

    api = ScriptedApi([[pod("a", 1)], [pod("a", 1)]], [[]])
    reflector = Reflector(api, POD, "n", handler).start()  # pyright: ignore[reportArgumentType]
    assert reflector.wait_synced(10)
    assert seen.qsize() == 2
    reflector.stop()
    api.done.set()
