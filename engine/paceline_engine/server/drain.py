"""The client side of a drain: ask a running engine to stop admitting, then wait until nothing runs and KV is written.

Standard library only: a preStop hook must start in a moment.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

POLL_SECONDS = 0.2
REQUEST_TIMEOUT_SECONDS = 5.0

logger = logging.getLogger(__name__)


def drain(host: str, port: int, timeout: float, token: str | None) -> int:
    """Exit code: 0 nothing runs and KV is durable, 1 the engine can't be reached or `timeout` seconds are over."""
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    end = time.monotonic() + timeout
    try:
        in_flight = _call(f"{base}/admin/drain", token, {"deadline_s": timeout})["in_flight"]
        flush = "running"
        while (in_flight > 0 or flush == "running") and time.monotonic() < end:
            load = _call(f"{base}/v1/load", token)
            in_flight, flush = load["in_flight"], load["kv_flush"]
            if in_flight > 0 or flush == "running":
                time.sleep(POLL_SECONDS)
    except urllib.error.HTTPError as error:
        logger.error("the engine at %s refused: %s", base, _reason(error))
        return 1
    except (OSError, ValueError, KeyError) as error:
        logger.error("can't drain the engine at %s: %s: check --admin-port and that it runs", base, error)
        return 1
    if in_flight > 0:
        logger.error("%d requests still run after %g s", in_flight, timeout)
        return 1
    if flush != "done":
        logger.error("nothing runs, but not all KV is written after %g s: it is computed again", timeout)
        return 1
    logger.info("drained: nothing runs, and KV is written")
    return 0


def _call(url: str, token: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_SECONDS) as response:
        return json.load(response)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
