"""HTTP/1.1 as far as a model server needs it: keep-alive, bodies by length or chunks, replies whole or streamed.

One `asyncio.Protocol` a connection: a thousand streams cost a thousand small writes a step and nothing else.
"""

import asyncio
import json
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
_LENGTH = re.compile(r"\d+")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")


@dataclass(frozen=True, slots=True)
class Message:
    """One request: header names in lower case."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON; ValueError when it is not."""
        return json.loads(self.body)


class BadMessage(Exception):
    """What the peer sent is not a request we can read."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


def parse(buffer: bytearray) -> tuple[Message, int] | None:
    """The first whole request in a buffer and its length in bytes; None while it is not all there.

    Raises:
        BadMessage: it never will be a request.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > MAX_HEAD:
            raise BadMessage(431, "request head too long")
        return None
    method, path, headers = _head(bytes(buffer[:end]).decode("latin-1"))
    start = end + 4
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body, used = _chunked(buffer, start)
    else:
        body, used = _sized(buffer, start, headers.get("content-length", "0"))
    return None if body is None else (Message(method, path, headers, body), used)


def _head(text: str) -> tuple[str, str, dict[str, str]]:
    first, *lines = text.split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadMessage(400, "not an HTTP/1.1 request line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadMessage(400, "a header line without a colon")
        headers[name.strip().lower()] = value.strip()
    return parts[0], parts[1].partition("?")[0], headers


def _sized(buffer: bytearray, start: int, length: str) -> tuple[bytes | None, int]:
    if not _LENGTH.fullmatch(length):
        raise BadMessage(400, "content-length is not a number")
    if (size := int(length)) > MAX_BODY:
        raise BadMessage(413, "request body too large")
    end = start + size
    return (bytes(buffer[start:end]), end) if len(buffer) >= end else (None, 0)


def _chunked(buffer: bytearray, start: int) -> tuple[bytes | None, int]:
    body = bytearray()
    while True:
        if (line_end := buffer.find(b"\r\n", start)) < 0:
            return None, 0
        size_text = bytes(buffer[start:line_end]).partition(b";")[0].strip()
        if not _CHUNK_SIZE.fullmatch(size_text):
            raise BadMessage(400, "bad chunk size")
        size, start = int(size_text, 16), line_end + 2
        if len(body) + size > MAX_BODY:
            raise BadMessage(413, "request body too large")
        if len(buffer) < start + size + 2:
            return None, 0
        body += buffer[start : start + size]
        start += size + 2
        if not size:
            return bytes(body), start


class Connection(asyncio.Protocol):
    """One connection; requests on it are answered one after another."""

    def __init__(self, handle: Callable[["Connection", Message], None], known: set["Connection"]) -> None:
        self._handle = handle
        self._known = known
        self._buffer = bytearray()
        self._busy = False
        self._keep = True
        self.transport: asyncio.Transport | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def open(self) -> bool:
        """Whether something written would still go out."""
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._known.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: whoever works for this connection is told."""
        self._known.discard(self)
        self.transport = None
        if self.on_close is not None:
            self.on_close()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._buffer += data
        self._next()

    def reply(self, status: int, body: bytes | str | dict[str, Any], kind: str = "application/json") -> None:
        """Answer whole."""
        raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.write(f"{self._status(status, kind)}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        self._answered()

    def begin_stream(self) -> None:
        """Send the head of an event stream; `chunk` and `end_stream` follow."""
        self.write(f"{self._status(200, 'text/event-stream')}transfer-encoding: chunked\r\n\r\n".encode())

    def chunk(self, data: bytes) -> None:
        """One chunk of a stream."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """The stream is complete."""
        self.write(b"0\r\n\r\n")
        self._answered()

    def write(self, raw: bytes) -> None:
        """Bytes as they are."""
        if self.transport is not None and self.open:
            self.transport.write(raw)

    def close(self) -> None:
        """End the connection after what was written."""
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        if self.transport is None:
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _status(self, status: int, kind: str) -> str:
        keep = "keep-alive" if self._keep else "close"
        return (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nserver: simulated\r\n"
            f"content-type: {kind}\r\nconnection: {keep}\r\n"
        )

    def _answered(self) -> None:
        self._busy = False
        self.on_close = None
        if not self._keep:
            self.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._busy or not self.open:
            return
        try:
            found = parse(self._buffer)
        except BadMessage as error:
            self._keep = False
            self.reply(error.status, {"error": {"message": str(error), "code": error.status}})
            return
        if found is None:
            return
        message, used = found
        del self._buffer[:used]
        self._busy = True
        self._keep = message.headers.get("connection", "").lower() != "close"
        self._handle(self, message)
