"""How the machines of a distributed load talk: JSON, a line a message, over one TCP connection each.

Both ends prove that they know the token of the run's folder before anything else is said, each by a keyed digest of the
other's challenge, so that the token itself never travels. What follows is neither encrypted nor signed: this is for the
inside of a cluster, as the requests themselves are.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from pathlib import Path
from typing import Any, Self

from harness.errors import InputError, MeasurementError
from harness.files import write_json

_GREETING_S = 10.0
_SILENT_S = 900.0  # a worker is silent while it understands what a level brought: about 20 us a chunk
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine that fell over is noticed in 30 s
_LINE = 1 << 28  # bytes of the longest message: a record with its text and chunks is far below


class ChannelClosed(Exception):
    """The other end is gone, or silent, or says what is no message."""


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the clocks are compared over this
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has them
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self._stream = sock.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        """Say one thing.

        Raises:
            ChannelClosed: nobody listens any more.
        """
        self.send_line(json.dumps(message, separators=(",", ":")))

    def send_line(self, line: str) -> None:
        """Say what is JSON already."""
        try:
            self._sock.sendall(line.encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error

    def receive(self, timeout_s: float | None = _SILENT_S) -> dict[str, Any]:
        """The other end's next word.

        Raises:
            ChannelClosed: none came in time, or the other end is gone.
        """
        try:
            self._sock.settimeout(timeout_s)
            line = self._stream.readline(_LINE)
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error
        if not line.endswith(b"\n"):
            raise ChannelClosed("the connection ended")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ChannelClosed(f"what came is no message: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ChannelClosed(f"what came is no message: {line[:80]!r}")
        return message

    def close(self) -> None:
        """End the connection; whoever waits at it, here or there, is woken."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._stream.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def welcome(channel: Channel, token: str) -> dict[str, Any]:
    """The coordinator's half of the greeting; returns what the worker says of itself.

    Raises:
        ChannelClosed: it does not know the token.
    """
    challenge = secrets.token_hex(16)
    channel.send({"challenge": challenge})
    answer = channel.receive(_GREETING_S)
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "worker", challenge)):
        channel.send({"refused": "the token is another's"})
        raise ChannelClosed("it does not know this run's token")
    channel.send({"proof": _proof(token, "coordinator", str(answer.get("challenge")))})
    return answer


def greet(channel: Channel, token: str, about: dict[str, Any]) -> None:
    """The worker's half of the greeting.

    Raises:
        ChannelClosed: the other end is not this run's coordinator.
    """
    challenge = secrets.token_hex(16)
    asked = channel.receive(_GREETING_S).get("challenge")
    channel.send({**about, "proof": _proof(token, "worker", str(asked)), "challenge": challenge})
    answer = channel.receive(_GREETING_S)
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "coordinator", challenge)):
        raise ChannelClosed(str(answer.get("refused", "it does not know this run's token")))


def write_contact(path: Path, host: str, port: int, token: str) -> None:
    """Where a run's coordinator listens, for its owner's eyes only."""
    write_json(path, {"host": host, "port": port, "token": token}, mode=0o600)


def read_contact(path: Path) -> tuple[str, int, str] | None:
    """Host, port and token; None where there is no such file, or none of ours."""
    try:
        told = json.loads(path.read_text())
        return str(told["host"]), int(told["port"]), str(told["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failed(message: dict[str, Any]) -> InputError | MeasurementError:
    """A worker's error as one of ours."""
    kind = InputError if message.get("kind") == "input" else MeasurementError
    return kind(str(message["error"]), details=message.get("details") or (), hint=message.get("hint"))


def _proof(token: str, who: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"{who}:{challenge}".encode(), hashlib.sha256).hexdigest()
