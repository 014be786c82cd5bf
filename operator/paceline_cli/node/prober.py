"""Carries out probes and preStop hooks: HTTP GET, TCP connect, exec.

HTTP follows the kubelet: 200..399 is success, certificates are not verified, a redirect counts as success and is not
followed, the answer's body is not read beyond what a message needs. Imports no HTTP library: one request line and one
status line are all a probe needs, and a probe must not keep connections.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline_cli.node.pod import Container, Exec, HttpGet, Sleep, TcpSocket

ExecRunner = Callable[[tuple[str, ...], float], Awaitable[tuple[int, str]]]
"""(argv, timeout s) -> (exit code, tail of output); raises TimeoutError."""

_STATUS_LINE_MAX = 8192


@dataclass(frozen=True, slots=True)
class Target:
    """Where a container's probes go: the pod's address, and its ports as this node reaches them."""

    pod_ip: str
    port: Callable[[int], int]
    container: Container
    run: ExecRunner

    def resolve(self, port: int | str) -> int:
        """A port's number by its name or number; ValueError for an unknown name."""
        if isinstance(port, str):
            named = next((p.port for p in self.container.ports if p.name == port), None)
            if named is None:
                raise ValueError(f"container {self.container.name} has no port named {port}")
            port = named
        return self.port(port)


async def check(action: HttpGet | TcpSocket | Exec | Sleep, target: Target, timeout_s: float) -> tuple[bool, str]:
    """(success, message). Every failure is an answer, not an exception."""
    try:
        async with asyncio.timeout(timeout_s):
            match action:
                case HttpGet():
                    return await _http_get(action, target)
                case TcpSocket():
                    _, writer = await asyncio.open_connection(action.host or target.pod_ip, target.resolve(action.port))
                    writer.close()
                    return True, ""
                case Exec():
                    code, output = await target.run(action.command, timeout_s)
                    return code == 0, "" if code == 0 else f"exit code {code}: {output.strip()[-200:]}"
                case Sleep():
                    await asyncio.sleep(action.seconds)
                    return True, ""
    except TimeoutError:
        return False, f"timed out after {timeout_s:g} s"
    except (OSError, ValueError, EOFError) as error:
        return False, str(error)


async def _http_get(action: HttpGet, target: Target) -> tuple[bool, str]:
    host, port = action.host or target.pod_ip, target.resolve(action.port)
    context = None
    if action.scheme == "HTTPS":
        # The kubelet does not verify: it talks to a pod by IP.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=_STATUS_LINE_MAX)
    try:
        headers = {
            "Host": f"{host}:{port}",
            "User-Agent": "kube-probe/paceline",
            "Accept": "*/*",
            "Connection": "close",
        }
        headers |= dict(action.headers)
        path = action.path if action.path.startswith("/") else "/" + action.path
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        await writer.drain()
        words = (await reader.readline()).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            return False, "not an HTTP answer"
        code = int(words[1])
        return 200 <= code < 400, f"HTTP status {code}"
    finally:
        writer.close()
