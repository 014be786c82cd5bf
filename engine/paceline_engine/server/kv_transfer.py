"""kv_transfer_params of a request and of an answer: who computes the prompt, and what he lends to whoever goes on.

The names are vLLM's where they mean the same, so that routers know them. What vLLM's routers send as null beside them
says nothing here: an engine finds chunks by their content, not by somebody's address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from paceline_engine.messages import Handoff
from paceline_engine.server.errors import invalid

NAME = "kv_transfer_params"
MAX_CHUNKS = 2**31

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
Number = Annotated[int, Field(ge=1, lt=MAX_CHUNKS)]


class KVTransferParams(BaseModel):
    """do_remote_decode: compute the prompt and one token, and lend its KV. do_remote_prefill: use the KV of the others.

    The other fields are those of the answer to a request with do_remote_decode.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: Hex | None = None
    epoch: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}\.[0-9]{1,18}$")] | None = None
    namespace: Hex | None = None
    num_tokens: Number | None = None
    num_chunks: Number | None = None
    expires_at: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None

    def check(self) -> None:
        """Raises ApiError (400) for what no field can see alone."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise invalid(
                f"{NAME}: do_remote_decode and do_remote_prefill exclude each other: set one of them",
                _of("do_remote_prefill"),
            )
        given = {name for name in Handoff.__struct_fields__ if getattr(self, name) is not None}
        missing = next((name for name in Handoff.__struct_fields__ if name not in given), None)
        if self.do_remote_prefill and missing is not None:
            raise invalid(f"{_of(missing)} is missing: send what the prefill engine answered", _of(missing))
        if not self.do_remote_prefill and given:
            name = min(given)
            raise invalid(f"{_of(name)} needs do_remote_prefill=true: set it, or leave {name} out", _of(name))

    @property
    def handoff(self) -> Handoff | None:
        """What another engine lends; of checked parameters."""
        if not self.do_remote_prefill:
            return None
        return Handoff(**{name: getattr(self, name) for name in Handoff.__struct_fields__})


def check_alone(params: KVTransferParams | None, *, stream: bool, n: int, num_prompts: int) -> None:
    """Raises ApiError (400) for a request that can't be handed off as a whole."""
    if params is None:
        return
    params.check()
    if num_prompts > 1 and (params.do_remote_decode or params.do_remote_prefill):
        raise invalid(f"prompt: {num_prompts} prompts can't be handed off together: send one a request", "prompt")
    if params.do_remote_decode and stream:
        raise invalid("stream: there is one token with do_remote_decode: set stream=false", "stream")
    if params.do_remote_decode and n > 1:
        raise invalid("n: with do_remote_decode only the prompt is computed: leave n out", "n")


def transfer_params(handoffs: Iterable[Handoff | None]) -> dict[str, Any]:
    """What an answer says of what is lent, if anything is, and a request to the decode engine repeats."""
    handoff = next((handoff for handoff in handoffs if handoff is not None), None)
    if handoff is None:
        return {}
    return {NAME: {"do_remote_prefill": True, "do_remote_decode": False, **msgspec.to_builtins(handoff)}}


def _of(name: str) -> str:
    return f"{NAME}.{name}"
