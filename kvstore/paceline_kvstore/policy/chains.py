"""Which chunk follows which: the forest of shared prefixes among the chunks that are held. Must not do I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Chains(Generic[K]):
    """Parent and children of each key. A child may come before its parent, and may stay when the parent goes."""

    def __init__(self) -> None:
        self._parent: dict[K, K | None] = {}
        # Also under parents that are not held themselves, so that order of arrival does not matter.
        self._children: dict[K, dict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __iter__(self) -> Iterator[K]:
        return iter(self._parent)

    def add(self, key: K, parent: K | None) -> None:
        """`key` is held from now on. A key that names itself as its parent starts a chain."""
        parent = None if parent == key else parent
        self._parent[key] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None

    def remove(self, key: K) -> None:
        parent = self._parent.pop(key)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]

    def onward(self, key: K) -> Iterator[K]:
        """`key`, the newest that follows it, the newest that follows that, to the end of a chain."""
        seen: set[K] = set()
        yield key
        # A ring cannot come from honest hashes; a forged one must not hang the tier.
        while key not in seen and (children := self._children.get(key)):
            seen.add(key)
            key = next(reversed(children))
            yield key

    def first_end(self, order: Iterable[K], stays: Callable[[K], bool]) -> K | None:
        """The end of the chain that hangs on the first key that has one which need not stay; None if all must."""
        kept: set[K] = set()
        for key in order:
            path: list[K] = []
            for follower in self.onward(key) if key not in kept else ():
                if follower in kept:
                    break
                path.append(follower)
            else:
                if path and not stays(path[-1]):
                    return path[-1]
            # Each key is looked at once, however many keys before it lead to it.
            kept.update(path)
        return None

    def lineage(self, key: K | None) -> set[K]:
        """`key` and all that come before it, as far as they are held."""
        found: set[K] = set()
        while key is not None and key in self._parent and key not in found:
            found.add(key)
            key = self._parent[key]
        return found

    def descendants(self, keys: Iterable[K]) -> set[K]:
        """`keys` and all that are held and come after one of them without a gap."""
        found = set(keys)
        todo = list(found)
        while todo:
            new = [child for child in self._children.get(todo.pop(), ()) if child not in found]
            found.update(new)
            todo.extend(new)
        return found
