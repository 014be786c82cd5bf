"""Refusals and failures as the client sees them, in the OpenAI error shape."""

from __future__ import annotations

import json

from paceline_api.slo import End

Headers = tuple[tuple[bytes, bytes], ...]


class ApiError(Exception):
    """Ends a request with an HTTP status. `end` tells the SLO judge whose fault it was."""

    status = 500
    type = "server_error"
    code: str | None = None
    end = End.FAILED
    headers: Headers = ()

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        return json.dumps({"error": error_object(self.message, self.type, self.code, self.param)}).encode()


class ClientError(ApiError):
    status = 400
    type = "invalid_request_error"
    end = End.CLIENT_ERROR


class Unauthorized(ClientError):
    """`reason` is for the metric, never for the client."""

    status = 401
    code = "invalid_api_key"
    headers = ((b"www-authenticate", b"Bearer"),)

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelNotFound(ClientError):
    status = 404
    code = "model_not_found"


class NotFound(ClientError):
    status = 404
    code = "not_found"


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(ClientError):
    status = 408
    code = "request_timeout"
    headers = ((b"connection", b"close"),)


class BodyTooLarge(ClientError):
    status = 413
    code = "request_too_large"
    headers = ((b"connection", b"close"),)


class NoCapacity(ApiError):
    """Nothing could take the request now."""

    status = 503
    type = "service_unavailable"
    code = "no_capacity"
    end = End.REJECTED_CAPACITY
    headers = ((b"retry-after", b"1"),)


class UpstreamFailed(ApiError):
    status = 502
    type = "upstream_error"
    code = "upstream_failed"


def error_object(message: str, type_: str, code: str | None, param: str | None = None) -> dict[str, str | None]:
    return {"message": message, "type": type_, "param": param, "code": code}
