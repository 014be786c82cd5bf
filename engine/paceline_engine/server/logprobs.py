"""Log probabilities in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline_engine.messages import TokenLogprobs
from paceline_engine.tokenizer import Tokenizer

# JSON has no infinity; vLLM writes this.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content: list[dict[str, Any]] = []
    for entry in entries:
        top = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        content.append(_chat_token(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """The `logprobs` of one completion choice, over its chunks: offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """Entries are (token id, logprobs); the first token of a prompt has none."""
        made: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in entries:
            text = self._tokenizer.token_text(token_id)
            made["tokens"].append(text)
            made["text_offset"].append(self._offset)
            self._offset += len(text)
            made["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            made["top_logprobs"].append(None if entry is None else self._top(entry))
        return made

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text, the token itself included; of tokens with the same text the likeliest counts."""
        ranked = [*entry.top, (entry.token_id, entry.logprob)]
        likeliest_last = sorted(ranked, key=lambda pair: pair[1])
        return {self._tokenizer.token_text(token_id): finite(logprob) for token_id, logprob in likeliest_last}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token its own id and the likeliest ones."""
    made: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            made.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        made.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, logprob, rank in reversed(ranked)
            }
        )
    return made
