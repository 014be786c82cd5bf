"""Values of JSON Schema's `format` that are enforced, as patterns of our own.

Each pattern matches only strings that the format allows, and not always all of them: what a model writes is meant to be
accepted by every validator. Sources: RFC 3339 (dates and times), 4122 (uuid), 5321 (email), 1123 (hostname), 2673 and
4291 (addresses), 3986 (uri), ISO 8601 (duration).
"""

from __future__ import annotations

_DAY_28, _DAY_30, _DAY_31 = "(0[1-9]|1[0-9]|2[0-8])", "(0[1-9]|[12][0-9]|30)", "(0[1-9]|[12][0-9]|3[01])"
_DATE = f"[12][0-9]{{3}}-((0[13578]|1[02])-{_DAY_31}|(0[469]|11)-{_DAY_30}|02-{_DAY_28})"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_LABEL = "[a-zA-Z0-9]{1,20}(-[a-zA-Z0-9]{1,20})?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,3}}"
_DOMAIN = f"{_LABEL}(\\.{_LABEL}){{1,3}}"
_ATOM = "[a-zA-Z0-9_+-]{1,20}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_SEGMENT = "[a-zA-Z0-9._~-]"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,6}W|[0-9]{1,6}D|([0-9]{1,6}D)?T[0-9]{1,6}(H|M|S))",
    "email": f"{_ATOM}(\\.{_ATOM}){{0,2}}@{_DOMAIN}",
    "hostname": _HOST,
    "ipv4": f"{_OCTET}(\\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uri": f"https?://{_DOMAIN}(:[1-9][0-9]{{0,3}})?(/{_SEGMENT}*)*(\\?{_SEGMENT}+={_SEGMENT}*)?(#{_SEGMENT}*)?",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""Format name to a pattern that matches the whole string."""
