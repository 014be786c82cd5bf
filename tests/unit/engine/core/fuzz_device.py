"""A device with a memory: every KV slot knows of which tokens, tenant and adapter it is the state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from msgspec.structs import replace

from paceline_api.identity import chain_hashes
from paceline_engine.core.outputs import UNKNOWN, ScheduledRequest, StepPlan, StepResult
from paceline_engine.core.request import Request
from paceline_engine.core.stored_kv import Arrived, ChunkLoad, Wanted
from paceline_engine.messages import AddRequest, TokenLogprobs
from paceline_engine.rounds import in_rounds


class Memory:
    """Slots of all blocks. A slot's content stands for all tokens up to its own; None was never written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    def read(self, table: Sequence[int], position: int) -> int | None:
        return self._slots[table[position // self.block_size]][position % self.block_size]

    def write(self, table: Sequence[int], position: int, content: int | None) -> None:
        self._slots[table[position // self.block_size]][position % self.block_size] = content


class MemoryStore:
    """Keeps a random part of what it is given, and returns a random part of that."""

    def __init__(self, rng: random.Random, memory: Memory) -> None:
        self._rng = rng
        self._memory = memory
        self.kept: dict[str, list[int | None]] = {}

    def save(self, request: Request) -> int:
        count = self._rng.randint(0, request.num_computed_tokens)
        if count:
            self.kept[request.request_id] = [self._memory.read(request.block_ids, i) for i in range(count)]
        return count

    def load(self, request: Request, num_tokens: int, start: int = 0) -> int:
        assert start == request.num_computed_tokens, "tokens that are there already, maybe in shared blocks"
        contents = self.kept.pop(request.request_id)
        count = self._rng.randint(0, min(num_tokens, len(contents)))
        for position in range(start, count):
            self._memory.write(request.block_ids, position, contents[position])
        return count

    def drop(self, request: Request) -> None:
        self.kept.pop(request.request_id, None)

    def clear(self) -> None:
        self.kept.clear()


@dataclass
class Loading:
    """A load that the store was asked for. A mute one never ends by itself."""

    load: ChunkLoad
    is_mute: bool
    num_chunks: int = 0


class PrefixStore:
    """Chunks by key, with random delays, lies about what is there, failures halfway, and answers that never come."""

    def __init__(self, rng: random.Random, memory: Memory, chunk_blocks: int) -> None:
        self._rng = rng
        self._memory = memory
        self._chunk_blocks = chunk_blocks
        self.chunks: dict[bytes, list[int | None]] = {}
        self.loading: dict[str, Loading] = {}
        self.asked: set[str] = set()
        self.mute: set[str] = set()
        # Tenants of those who were told of something, until they take it or leave it.
        self.found: dict[str, str] = {}
        self.num_loaded = 0

    def keep(self, message: AddRequest, adapter_digest: str) -> None:
        """Have the chunks of a prompt, as from another engine."""
        size = self._memory.block_size
        keys = chain_hashes(message.prompt_token_ids, size, message.salt, adapter_digest)
        content, contents = root_of(message), list[int | None]()
        for token in message.prompt_token_ids:
            content = hash((content, token))
            contents.append(content)
        step = self._chunk_blocks
        for end in range(step, len(keys) + 1, step):
            self.chunks[keys[end - 1]] = contents[(end - step) * size : end * size]

    def find(self, wanted: Wanted) -> int | None:
        request_id, chain, first = wanted.request_id, wanted.chain, wanted.first
        assert request_id not in {*self.loading, *self.found}, "looked up again"
        assert first < len(chain)
        assert wanted.num_tokens >= (len(chain) - first) * self._chunk_blocks * self._memory.block_size
        assert wanted.deadline_s > 0.0
        assert wanted.queue_s >= 0.0
        self.asked.add(request_id)
        if self._rng.random() < 0.02:
            self.mute.add(request_id)
        if wanted.may_wait and (request_id in self.mute or self._rng.random() < 0.3):
            return None
        self.asked.discard(request_id)
        # Not all that there is may be worth it.
        there = [key in self.chunks and self._rng.random() < 0.9 for key in chain[first:]]
        count = [*there, False].index(False) + (self._rng.random() < 0.1)
        if count:
            self.found[request_id] = wanted.tenant
        return first + count

    def begin(self, load: ChunkLoad) -> None:
        assert self.found.pop(load.request_id) == load.tenant
        assert load.request_id not in self.loading
        assert len(load.block_ids) == (len(load.chain) - load.first) * self._chunk_blocks > load.num_present
        self.loading[load.request_id] = Loading(load, self._rng.random() < 0.2)

    def poll(self) -> list[Arrived]:
        news = [self._go_on(loading) for loading in list(self.loading.values()) if self._rng.random() < 0.6]
        return [arrived for arrived in news if arrived is not None]

    def _go_on(self, loading: Loading) -> Arrived | None:
        load = loading.load
        key = load.chain[load.first + loading.num_chunks]
        is_there = key in self.chunks and self._rng.random() < 0.9
        self._write(loading, self.chunks[key] if is_there else None)
        loading.num_chunks += is_there
        self.num_loaded += is_there
        is_over = (not is_there or load.first + loading.num_chunks == len(load.chain)) and not loading.is_mute
        if is_over:
            del self.loading[load.request_id]
        elif not is_there or load.first + loading.num_chunks == len(load.chain):
            loading.num_chunks -= is_there  # Once more and once more.
            return None
        return Arrived(request_id=load.request_id, tiers=("fake",) * loading.num_chunks, is_over=is_over)

    def _write(self, loading: Loading, contents: list[int | None] | None) -> None:
        """The next chunk, or garbage where it fails halfway."""
        size, begin = self._memory.block_size, loading.num_chunks * self._chunk_blocks
        for position in range(begin * size, (begin + self._chunk_blocks) * size):
            if position >= loading.load.num_present * size:
                content = contents[position - begin * size] if contents is not None else -1
                self._memory.write(loading.load.block_ids, position, content)

    def cancel(self, request_id: str) -> None:
        self.loading.pop(request_id, None)
        self.found.pop(request_id, None)
        self.asked.discard(request_id)
        self.mute.discard(request_id)

    def offer(self, key: bytes, parent: bytes | None, block_ids: Sequence[int], tenant: str) -> bool:
        if self._rng.random() < 0.2:
            return False
        contents = [self._memory.read(block_ids, i) for i in range(self._chunk_blocks * self._memory.block_size)]
        assert self.chunks.get(key, contents) == contents, "another content under one key"
        if self._rng.random() < 0.9:
            self.chunks[key] = contents
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.chunks.pop(key, None)

    def clear(self) -> None:
        self.chunks.clear()


def next_token(content: int) -> int:
    """What follows the text that `content` stands for: 0, which ends it, one time in 30."""
    return 0 if content % 30 == 0 else 1 + content % 12


def root_of(message: AddRequest) -> int:
    """Where a text's contents begin: another tenant or adapter has others."""
    return crc32(repr((message.salt, message.adapter)).encode())


def text_of(message: AddRequest, count: int) -> list[int]:
    """The first `count` tokens that a request must get, whoever runs beside it, whatever ends it."""
    content, tokens = root_of(message), []
    for token in message.prompt_token_ids:
        content = hash((content, token))
    for _ in range(count):
        tokens.append(next_token(content))
        content = hash((content, tokens[-1]))
    return tokens


class Device:
    """Follows block tables as a device must, checks what it reads, and continues each text in the only right way."""

    def __init__(self, rng: random.Random, memory: Memory) -> None:
        self._rng = rng
        self._memory = memory
        self._root: dict[str, int] = {}
        self._prompt_logprobs: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._end: dict[str, int | None] = {}

    def announce(self, message: AddRequest) -> None:
        """What the client knows and the plan doesn't say: whose KV it is."""
        self._root[message.request_id] = root_of(message)
        if message.sampling.prompt_logprobs is not None:
            self._prompt_logprobs[message.request_id] = len(message.prompt_token_ids)

    def execute(self, plan: StepPlan) -> list[StepResult]:
        """Now and then a row stops before it has had all of its steps, as one does that has ended."""
        return in_rounds(plan, self._execute_once, lambda _: self._rng.random() < 0.1)

    def _execute_once(self, plan: StepPlan) -> list[StepResult]:
        for request_id in plan.released:
            self._tables.pop(request_id, None)
        for admitted in plan.admitted:
            assert admitted.request_id not in self._tables
            self._tables[admitted.request_id] = []
            self._tokens[admitted.request_id] = list(admitted.token_ids)
        assert {admitted.request_id for admitted in plan.admitted} <= {item.request_id for item in plan.scheduled}
        fresh = {admitted.request_id for admitted in plan.admitted}
        written: set[tuple[int, int]] = set()
        answers = [
            self._answer(item, self._compute(item, item.request_id in fresh, written)) for item in plan.scheduled
        ]
        return [answer for answer in answers if answer is not None]

    def _compute(self, item: ScheduledRequest, fresh: bool, written: set[tuple[int, int]]) -> list[int]:
        """The contents of the share's slots, which are now in memory."""
        name, table = item.request_id, self._tables[item.request_id]
        known = self._tokens[name]
        if item.token_ids[-1] == UNKNOWN:  # A row that has failed may take any.
            item = replace(item, token_ids=known[item.start : item.end] or [0])
        table += item.new_block_ids
        assert len(table) * self._memory.block_size >= item.end + item.num_steps - 1
        assert item.token_ids[: len(known) - item.start] == known[item.start : item.num_known_tokens]
        assert fresh or self._end[name] in (item.start, None), "a gap or an overlap in computed tokens"
        content = self._root[name]
        contents: list[int] = []
        check = fresh or self._rng.random() < 0.1
        for position in range(item.end):
            token = known[position] if position < item.start else item.token_ids[position - item.start]
            content = hash((content, token))
            if position >= item.start:
                slot = (table[position // self._memory.block_size], position % self._memory.block_size)
                assert slot not in written, "two requests write one slot"
                written.add(slot)
                self._memory.write(table, position, content)
                contents.append(content)
            elif check:
                assert self._memory.read(table, position) == content, f"{name} reads foreign KV at {position}"
        self._end[name] = item.num_known_tokens
        return contents

    def _answer(self, item: ScheduledRequest, contents: list[int]) -> StepResult | None:
        rng, name = self._rng, item.request_id
        if rng.random() < 0.01:
            self._end[name] = None  # A further step is made again; a plan that is in flight already goes on.
            return StepResult(name, error="not finite")
        last = self._prompt_logprobs.get(name, 0) - 1
        prompt = tuple(TokenLogprobs(position + 1, -1.0, 1) for position in range(item.start, min(item.end, last)))
        assert not (item.embed and item.sample)
        if item.embed:
            assert item.end == len(self._tokens[name]), "an embedding of a part of the prompt"
            return StepResult(name, embedding=name.encode())
        if not item.sample:
            return StepResult(name, prompt_logprobs=prompt) if prompt else None
        following = contents[len(contents) - 1 - item.num_draft_tokens :]
        tokens = [next_token(following[0])]
        for guess, content in zip(
            item.token_ids[len(item.token_ids) - item.num_draft_tokens :], following[1:], strict=True
        ):
            if guess != tokens[-1]:
                break
            tokens.append(next_token(content))
        self._tokens[name] += tokens
        self._end[name] = item.num_known_tokens + len(tokens) - 1
        drafts = self._guesses(hash((following[len(tokens) - 1], tokens[-1])), item.num_wanted_drafts)
        return StepResult(name, tuple(tokens), prompt_logprobs=prompt, draft_token_ids=drafts)

    def _guesses(self, content: int, count: int) -> tuple[int, ...]:
        guesses: list[int] = []
        for _ in range(count):
            token = next_token(content)
            content = hash((content, token))
            guesses.append(token if self._rng.random() < 0.7 else self._rng.randint(1, 6))
        return tuple(guesses)
