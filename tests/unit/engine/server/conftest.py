"""The public HTTP app over a core whose tokens a test writes: real parsing, tokenizer, templates, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from paceline_engine.chat_template import ChatTemplate
from paceline_engine.core_client import Arrival, CoreError
from paceline_engine.core_grammars import Constraint, GrammarRefused
from paceline_engine.messages import AddRequest, CoreReady, CoreStats, RequestOutput
from paceline_engine.metrics import EngineMetrics
from paceline_engine.models.config import ModelConfig
from paceline_engine.models.loader import LoadedModel
from paceline_engine.server.admin import build_admin_app
from paceline_engine.server.engine import Engine, Serving
from paceline_engine.server.routes import build_http_app
from paceline_engine.structured.source import GrammarSource
from paceline_engine.tokenizer import Tokenizer, byte_alphabet

EOS = 256
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|python_tag|>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{{ extra }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 512


def byte_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte, ids 0..255 in the order of bytes, then the special tokens."""
    alphabet = dict(byte_alphabet())
    rust = RustTokenizer(models.BPE(vocab=alphabet, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(text, special=True) for text in ["</s>", *SPECIALS]])
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


class FakeStream:
    """Outputs that a test wrote; the request counts as live until it ends or is closed."""

    def __init__(self, core: FakeCore, outputs: Sequence[RequestOutput]) -> None:
        self._core = core
        self._outputs = list(outputs)
        self.closed = False

    async def next(self) -> list[Arrival]:
        await asyncio.sleep(0)
        if not self._outputs:
            await asyncio.Event().wait()
        return [Arrival(self._outputs.pop(0), self._core.clock())]

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeCore:
    """Answers each request with what `script` makes of it."""

    script: Callable[[AddRequest], Sequence[RequestOutput]]
    max_live: int = 32
    requests: list[AddRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    stats: CoreStats = field(default_factory=CoreStats)
    commands: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    now: float = 100.0
    refusal: str = ""
    loaded: list[str] = field(default_factory=list)
    constraints: list[str | None] = field(default_factory=list)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def room_for(self, count: int) -> bool:
        return count <= self.max_live

    def silent_seconds(self) -> float:
        return 0.0

    @property
    def grammars(self) -> FakeCore:
        return self

    async def ready(self, constraint: Constraint) -> None:
        if self.refusal:
            raise GrammarRefused(self.refusal)
        self.loaded.append(constraint.key)

    def submit(self, request: AddRequest, constraint: Constraint | None = None) -> FakeStream:
        self.requests.append(request)
        self.constraints.append(None if constraint is None else constraint.key)
        self.streams.append(FakeStream(self, self.script(request)))
        return self.streams[-1]

    async def command(self, name: str, /, **arguments: str) -> dict[str, Any]:
        if self.refusal:
            raise CoreError(self.refusal)
        self.commands.append((name, arguments))
        return {"done": name, "digest": "d"}


class FakeCompiler:
    """Remembers what was to be compiled."""

    def __init__(self) -> None:
        self.sources: list[GrammarSource] = []

    async def compile(self, source: GrammarSource) -> Constraint:
        self.sources.append(source)
        return Constraint(key=source.key(""), grammar=b"")


@dataclass
class Server:
    """An engine's two apps and what they asked of the core."""

    engine: Engine
    core: FakeCore
    compiler: FakeCompiler

    def call(self, path: str, body: dict[str, Any] | bytes, *, admin: bool = False, **headers: str) -> httpx.Response:
        """POST a body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send(
            "POST", path, admin, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def get(self, path: str, *, admin: bool = False) -> httpx.Response:
        return self._send("GET", path, admin)

    def _send(self, method: str, path: str, admin: bool, **more: Any) -> httpx.Response:
        app = build_admin_app(self.engine, None, lambda _: None) if admin else build_http_app(self.engine, None)

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
                return await client.request(method, path, **more)

        return asyncio.run(send())

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
        return self.call("/v1/chat/completions", body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.call("/v1/completions", {"model": "m", "prompt": "abc"} | fields)


def model_of(folder: Path) -> LoadedModel:
    config = ModelConfig(
        architecture="llama", vocab_size=300, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=MAX_MODEL_LEN, rms_norm_eps=1e-5, rope_theta=1e4,
        eos_token_ids=(EOS,),
    )  # fmt: skip
    return LoadedModel(
        directory=folder, config=config, files=[], weights_digest="w", tokenizer_digest="t",
        tokenizer_file=folder / "tokenizer.json", chat_template=TEMPLATE, special_tokens={},
    )  # fmt: skip


@pytest.fixture
def new_server(tmp_path: Path) -> Callable[..., Server]:
    """Make a server from a script: request -> outputs."""

    def make(script: Callable[[AddRequest], Sequence[RequestOutput]], *, lends: bool = False, **more: Any) -> Server:
        core, compiler = FakeCore(script), FakeCompiler()
        metrics = EngineMetrics(CollectorRegistry(), "m")
        engine = Engine(model_name="m", metrics=metrics, progress_timeout=10.0, clock=core.clock, config_hash="c")
        ready = CoreReady(
            num_blocks=8,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            namespace_digest="n",
            load_seconds=0.0,
            lends=lends,
        )
        fields: dict[str, Any] = {"tool_format": "hermes"} | more
        serving: Any = Serving
        engine.set_serving(
            serving(
                model=model_of(tmp_path),
                tokenizer=byte_tokenizer(tmp_path),
                template=ChatTemplate(TEMPLATE, {}, lambda: datetime(2026, 1, 1, tzinfo=UTC)),
                core=core,
                ready=ready,
                compiler=compiler,
                **fields,
            )
        )
        return Server(engine, core, compiler)

    return make


@pytest.fixture
def says(new_server: Callable[..., Server]) -> Callable[..., Server]:
    """Make a server whose every answer is a text, a given number of tokens an output, then end of sequence."""

    def make(text: str | bytes, *, step: int = 1, end: str = "stop", **more: Any) -> Server:
        ids = list(text.encode() if isinstance(text, str) else text)

        def script(request: AddRequest) -> list[RequestOutput]:
            tail = [EOS] if end == "stop" else []
            parts = [ids[at : at + step] for at in range(0, len(ids), step)]
            parts = [*parts[:-1], [*(parts[-1] if parts else []), *tail]]
            return [
                RequestOutput(
                    request_id=request.request_id,
                    new_token_ids=tuple(part),
                    finish_reason=end if at == len(parts) - 1 else None,
                )
                for at, part in enumerate(parts)
            ]

        return new_server(script, **more)

    return make
