"""What the headers of a request say: its id, salt, priority and remaining time, as the router sets them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from paceline_api.wire import HEADER_DEADLINE_MS, HEADER_PRIORITY, HEADER_SALT, HEADER_TENANT
from paceline_engine.server.errors import invalid
from paceline_engine.server.schemas import MAX_SALT_CHARS


@dataclass(frozen=True, slots=True)
class Caller:
    """The headers' values. request_id: the client's or a new one. tenant: whose quota of stored KV it is.

    deadline_ms: remaining when the request arrived.
    """

    request_id: str = ""
    salt: str = ""
    tenant: str = ""
    priority: int | None = None
    deadline_ms: int | None = None

    def end_of(self, arrived: float, deadline_ms: int | None) -> float | None:
        """When a request must be done that arrived then with this limit in its body; the sooner one holds."""
        limits = [ms for ms in (deadline_ms, self.deadline_ms) if ms is not None]
        return arrived + min(limits) / 1000 if limits else None


def caller_of(request: Request) -> Caller:
    """Raises ApiError (400) that names the header."""
    salt, tenant = (_text(request, name) for name in (HEADER_SALT, HEADER_TENANT))
    return Caller(
        request_id=request.state.request_id,
        salt=salt,
        tenant=tenant,
        priority=_integer(request, HEADER_PRIORITY, 2**31),
        deadline_ms=_integer(request, HEADER_DEADLINE_MS, 2**53),
    )


def _text(request: Request, name: str) -> str:
    text = request.headers.get(name, "")
    if len(text) > MAX_SALT_CHARS:
        raise invalid(f"header {name} is longer than {MAX_SALT_CHARS} characters", name)
    return text


def _integer(request: Request, name: str, bound: int) -> int | None:
    """A header with a whole number in (-bound, bound), or None without it."""
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = int(text) if len(text) < 20 else bound
    except ValueError:
        value = bound
    if not -bound < value < bound:
        raise invalid(f"header {name}: {text[:40]!r} is not a whole number", name)
    return value
