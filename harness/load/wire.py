"""HTTP/1.1 as a load client needs it: one request's bytes, where a response ends, and which byte carried what.

`Framer` watches a response as it arrives and says only when it is whole; `response` takes the whole apart afterwards.
RFC 9112 is the source of every rule here.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_END = b"\r\n\r\n"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |\r|$)")
_VERSION = b"HTTP/1."  # what every status line begins with
_LARGEST_HEAD = 1 << 18
_LONGEST_NUMBER = 18  # digits of a length; more are no length, and Python does not read thousands
_USUAL_LINE = 16  # bytes within which a chunk's size line ends


class WireError(ValueError):
    """The bytes are not an HTTP/1.1 response; the message says what was seen."""


class Head(NamedTuple):  # not a dataclass: importing those takes a tenth of a measuring process's start
    """Status and headers of a response, header names in lower case."""

    status: int
    headers: Mapping[str, str]

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return self.headers.get("transfer-encoding", "").lower().endswith("chunked")

    @property
    def length(self) -> int | None:
        """Body length where the head says it; None: chunked, or until the connection closes."""
        if self.status in {204, 304}:
            return 0
        if self.chunked:
            return None
        text = self.headers.get("content-length")
        if text is not None and not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
            raise WireError(f"content-length is `{text[:60]}`")
        return int(text) if text is not None else None

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this response."""
        return "close" in self.headers.get("connection", "").lower()


class Response(NamedTuple):
    """A response taken apart; `complete` is False when it stops before its own end. `fault` says what is not HTTP.

    `frames` maps the body to the wire: one `(end, shift)` a frame, in order; the body byte at offset `i` of the first
    frame with `i < end` was the raw byte at `i + shift`. `trailing` counts bytes after the end, which nobody asked for.
    """

    head: Head | None
    body: bytes = b""
    frames: tuple[tuple[int, int], ...] = ()
    complete: bool = False
    fault: str | None = None
    trailing: int = 0


def request(host: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """The bytes of one POST. `Accept-Encoding: identity` refuses compression, which would hide chunk boundaries."""
    fields = {
        "Host": host,
        "User-Agent": "harness",
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        **headers,
        "Content-Length": str(len(body)),
    }
    for name, value in fields.items():
        if "\r" in name + value or "\n" in name + value:
            raise WireError(f"header `{name}` holds a line break")
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def parse_head(raw: bytes) -> Head:
    """Status line and header lines, without the empty line after them."""
    first, _, rest = raw.partition(b"\r\n")
    match = _STATUS.match(first)
    if match is None:
        raise WireError(f"not an HTTP/1.1 status line: `{first[:60].decode('latin-1')}`")
    headers: dict[str, str] = {}
    for line in rest.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            key = name.decode("latin-1").strip().lower()
            text = value.decode("latin-1").strip()
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return Head(int(match[1]), headers)


def _final_head(raw: bytes | bytearray, start: int = 0) -> tuple[Head, int] | None:
    """The first head that is not an interim (1xx) one, and where its body starts; None: not all there yet."""
    while (end := raw.find(_END, start)) >= 0:
        head = parse_head(bytes(raw[start:end]))
        start = end + 4
        if head.status >= 200:
            return head, start
    if not _VERSION.startswith(begun := bytes(raw[start : start + len(_VERSION)])):
        raise WireError(f"not an HTTP/1.1 status line: `{begun.decode('latin-1')}`")
    if len(raw) - start > _LARGEST_HEAD:
        raise WireError(f"no end of the header within {_LARGEST_HEAD} bytes")
    return None


class Framer:
    """Says when one response is whole, exactly, from its bytes in order; keeps no body.

    `feed` takes the next bytes and returns whether the response is whole; `closed` whether a connection that ends now
    makes it whole (a body without length or chunks).
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.done = False
        self._rest = bytearray()
        self._skip = 0  # body bytes still to pass by
        self._trailer = False

    def feed(self, data: bytes) -> bool:
        """Take the next bytes.

        Raises:
            WireError: they cannot belong to an HTTP/1.1 response.
        """
        self._rest += data
        if self.head is None:
            found = _final_head(self._rest)
            if found is None:
                return False
            self.head, start = found
            del self._rest[:start]
            self._skip = self.head.length or 0
        if self.head.chunked:
            self._chunks()
        elif self.head.length is not None:
            self._pass()
            self.done = self._skip == 0
        else:
            self._rest.clear()
        return self.done

    def closed(self) -> bool:
        """Whether the end of the connection is the proper end of this response."""
        return self.done or (self.head is not None and self.head.length is None and not self.head.chunked)

    def _pass(self) -> None:
        taken = min(self._skip, len(self._rest))
        del self._rest[:taken]
        self._skip -= taken

    def _chunks(self) -> None:
        while True:
            self._pass()
            if self._skip:
                return
            if self._trailer:
                self._trailers()
                return
            match = _SIZE.match(self._rest)
            if match is None:
                if len(self._rest) > 2048 or (self._rest and bytes(self._rest[:1]) not in _HEX):
                    raise WireError(f"not a chunk size: `{bytes(self._rest[:20]).decode('latin-1')}`")
                return
            size = int(match[1], 16)  # before the deletion: a match looks into the bytes it was found in
            del self._rest[: match.end()]
            self._skip = size + 2 if size else 0
            self._trailer = size == 0

    def _trailers(self) -> None:
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[: end + 1])
            del self._rest[: end + 1]
            if line in {b"\r\n", b"\n"}:
                self.done = True
                return


_HEX = frozenset(bytes([digit]) for digit in b"0123456789abcdefABCDEF")


def response(raw: bytes) -> Response:
    """Take one response's bytes apart, whole or not; never raises on what a server may send."""
    try:
        found = _final_head(raw)
    except WireError as error:
        return Response(None, fault=str(error))
    if found is None:
        return Response(None)
    head, start = found
    try:
        length = head.length
    except WireError as error:
        return Response(head, fault=str(error))
    if head.chunked:
        return _unchunk(head, raw, start)
    end = len(raw) if length is None else min(len(raw), start + length)
    body = raw[start:end]
    # Without a length the body ends with the connection; whether that was an end or a loss only the socket knows.
    complete = length is None or len(body) == length
    return Response(head, body, ((len(body), start),), complete, trailing=len(raw) - end)


def _unchunk(head: Head, raw: bytes, at: int) -> Response:
    pieces: list[bytes] = []
    frames: list[tuple[int, int]] = []
    sizes: dict[bytes, int] = {}  # size lines seen, which soon repeat: the line as it was written, and what it said
    total = 0
    while True:
        line = raw[at : raw.find(b"\n", at, at + _USUAL_LINE) + 1]
        size = sizes.get(line, 0)
        if size == 0:
            match = _SIZE.match(raw, at)
            if match is None:
                break
            line, size = match[0], int(match[1], 16)
            sizes[line] = size
        at += len(line)
        end = at + size
        if size == 0 or raw[end : end + 2] != b"\r\n":
            return _last_chunk(Response(head, b"".join(pieces), tuple(frames)), raw, at, size)
        pieces.append(raw[at:end])
        frames.append((total + size, at - total))
        total += size
        at = end + 2
    rest = raw[at : at + 20]
    fault = None
    if rest and (rest[:1] not in _HEX or b"\n" in rest):
        fault = f"not a chunk size: `{rest.decode('latin-1')!r}`"
    return Response(head, b"".join(pieces), tuple(frames), fault=fault)


def _last_chunk(before: Response, raw: bytes, at: int, size: int) -> Response:
    """The response at its last chunk, whose data starts at `at`: the empty one, a torn one, or one with a wrong end."""
    if size == 0:
        end = _trailer_end(raw, at)
        return before._replace(complete=end is not None, trailing=len(raw) - (end or len(raw)))
    piece, total = raw[at : at + size], len(before.body)
    fault = None
    if len(raw) >= at + size + 2:
        fault = f"a chunk ends in `{raw[at + size : at + size + 2].decode('latin-1')!r}`"
    frames = (*before.frames, (total + len(piece), at - total))
    return before._replace(body=before.body + piece, frames=frames, fault=fault)


def _trailer_end(raw: bytes, at: int) -> int | None:
    while (end := raw.find(b"\n", at)) >= 0:
        if raw[at : end + 1] in {b"\r\n", b"\n"}:
            return end + 1
        at = end + 1
    return None
