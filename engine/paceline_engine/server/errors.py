"""Errors in the shape OpenAI clients parse: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

RETRY_SOON_SECONDS = 1
RETRY_ELSEWHERE_SECONDS = 5


class ApiError(Exception):
    """An answer that is an error. `message` says what is wrong and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """The JSON body; also what a stream sends as its last event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = RETRY_ELSEWHERE_SECONDS) -> ApiError:
    """503: right request, not here and now."""
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after=retry_after)


def internal(message: str) -> ApiError:
    """500: accepted and failed."""
    return ApiError(500, message, kind="server_error", code="engine_error")


def deadline_exceeded(message: str) -> ApiError:
    """504: the request's own deadline passed, or can't be met."""
    return ApiError(504, message, kind="deadline_exceeded", code="deadline_exceeded")
