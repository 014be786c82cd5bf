"""Reading a request body within bounds, and the few fields of it that the router needs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from paceline_router.asgi import ClientGone, Receive
from paceline_router.errors import BodyTooLarge, BodyTooSlow, ClientError
from paceline_router.settings import EXCESS_BODY_BYTES_MAX

_HAND_OFF = "kv_transfer_params"
_ASK_USAGE = b'"stream_options":{"include_usage":true},'


class Question(NamedTuple):
    """What the router reads of a body. `states_usage`: the client itself says whether it wants token counts."""

    model: str
    stream: bool
    states_usage: bool

    @property
    def needs_usage(self) -> bool:
        """Whether the router must ask for the token count that it judges by, and keep it from the client."""
        return self.stream and not self.states_usage


async def read_body(receive: Receive, *, content_length: str | None, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTooSlow or ClientGone."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, _declared(content_length), max_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {timeout_s:g} s; send it faster") from None


def read_question(body: bytes) -> Question:
    """The fields that count. Raises ClientError for a body that is not a usable JSON object."""
    try:
        # Decoded here and strictly, so that what is spliced in later is in the same encoding.
        document: Any = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise ClientError("the request body is not valid JSON") from None
    if not isinstance(document, dict):
        raise ClientError("the request body must be a JSON object")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise ClientError("name a model in the field 'model'", param="model")
    if document.get(_HAND_OFF) is not None:
        # It has engines pin a tier's memory, and name KV to load.
        raise ClientError(f"{_HAND_OFF} is for who sends requests to engines itself; leave it out", param=_HAND_OFF)
    return Question(model, document.get("stream") is True, "stream_options" in document)


def with_usage(body: bytes) -> bytes:
    """The body of a JSON object without stream_options, asking for usage; the other bytes stay as they are.

    Engines send several tokens in one event when they are busy, so that events do not tell how many tokens there were.
    """
    brace = body.index(b"{") + 1
    return body[:brace] + _ASK_USAGE + body[brace:]


def _declared(content_length: str | None) -> int:
    return int(content_length) if content_length is not None and content_length.isdecimal() else 0


async def _read(receive: Receive, declared: int, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    too_large = declared > max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        too_large = too_large or size > max_bytes
        if too_large:
            parts.clear()
        else:
            parts.append(part)
        if not message.get("more_body", False) or size > max_bytes + EXCESS_BODY_BYTES_MAX:
            break
    if too_large:
        raise BodyTooLarge(f"the request body is larger than {max_bytes} bytes; send less, or raise maxBodyBytes")
    return b"".join(parts)
