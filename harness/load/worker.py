"""One machine of a distributed load: plays its share of each level that the coordinator names, and sends the records.

Run as `python -m harness.load.worker CONTACT`, where CONTACT is the file that the coordinator writes into the run's
folder (`harness.load.distributed`); it is waited for. What is read while a clock runs lies in a temporary folder of
this machine and is understood here afterwards: the shared file system and the coordinator are left in peace.
"""

import argparse
import contextlib
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, InputError
from harness.load import channel
from harness.load.channel import Channel, ChannelClosed
from harness.load.client import Level, Load, Share, Target
from harness.load.records import LevelTrace
from harness.load.transcript import Prepared

_WAIT_S = 0.25  # between looks for the contact file, and tries to connect


class Worker:
    """A worker and its connection.

    Args:
        line: the connection, greeted.
        pretended_ns: for tests of the correction only: everything this worker says of its clock is so much ahead.
    """

    def __init__(self, line: Channel, pretended_ns: int = 0) -> None:
        self._line = line
        self._pretended_ns = pretended_ns
        self._speaking = threading.Lock()
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._listening = threading.Thread(target=self._listen, name="orders", daemon=True)

    def serve(self) -> None:
        """Level after level, until the coordinator says goodbye or is gone."""
        self._listening.start()
        while "bye" not in (order := self._orders.get()):
            if "level" in order:
                with contextlib.suppress(ChannelClosed):
                    self._level(order)

    def _listen(self) -> None:
        """Take orders while a level runs; the clock is answered at once."""
        try:
            while True:
                order = self._line.receive(None)
                if "ping" in order:
                    heard = self._clock()
                    self._say({"pong": order["ping"], "heard": heard, "said": self._clock()})
                elif "stop" in order:
                    self._stop.set()
                else:
                    self._orders.put(order)
        except ChannelClosed:
            self._stop.set()
            self._orders.put({"bye": True})

    def _clock(self) -> int:
        return time.time_ns() + self._pretended_ns

    def _say(self, message: dict[str, Any]) -> None:
        with self._speaking:
            self._line.send(message)

    def _level(self, order: Mapping[str, Any]) -> None:
        self._stop.clear()
        requests = [_prepared(self._orders.get()) for _ in range(order["requests"])]
        with tempfile.TemporaryDirectory(prefix="harness-load-") as folder, contextlib.ExitStack() as closing:
            try:
                level = Level(
                    Target(**order["target"]), Load(**order["level"]), requests, Path(folder), Share(**order["share"])
                )
                closing.callback(level.end)
                level.open()
                self._say({"ready": True})
                go = self._orders.get()
                if "go" not in go:
                    return
                level.go(int(go["go"]) - self._pretended_ns)
                level.watch(self._stop, lambda **counts: self._say({"progress": counts}))
                self._tell(level.trace(None, None))
            except HarnessError as error:
                kind = "input" if isinstance(error, InputError) else "measurement"
                details = list(error.details)
                self._say({"error": error.message, "details": details, "hint": error.hint, "kind": kind})

    def _tell(self, trace: LevelTrace) -> None:
        """The level's records as they are stored, after what this machine says of itself."""
        with self._speaking:
            self._line.send({"facts": asdict(trace.client), "stopped": trace.stopped, "records": len(trace.records)})
            for record in trace.records:
                self._line.send_line(record.to_line())


def _prepared(message: Mapping[str, Any]) -> Prepared:
    return Prepared(**{**message, "body": str(message["body"]).encode("utf-8", "surrogateescape")})


def connect(contact: Path, wait_s: float, about: dict[str, Any]) -> Channel:
    """A greeted connection to the coordinator whose contact file this is, or will be.

    Raises:
        InputError: there was none within `wait_s`; says what was seen.
    """
    until, seen = time.monotonic() + wait_s, "it was not there"
    while True:
        if (told := channel.read_contact(contact)) is not None:
            host, port, token = told
            try:
                line = Channel(socket.create_connection((host, port), timeout=10.0))
            except OSError as error:
                seen = f"{host}:{port}: {error.strerror or error}"
            else:
                try:
                    channel.greet(line, token, about)
                    return line
                except ChannelClosed as closed:
                    line.close()
                    seen = f"{host}:{port}: {closed}"
        if time.monotonic() >= until:
            raise InputError(f"no coordinator was found by `{contact}` within {wait_s:.0f} s", details=[seen])
        time.sleep(_WAIT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    command = argparse.ArgumentParser(prog="harness.load.worker", description=str(__doc__).split("\n", maxsplit=1)[0])
    command.add_argument("contact", type=Path, help="the file that says where the coordinator is")
    command.add_argument("--wait-s", type=float, default=600.0, help="how long to wait for it (default: 600)")
    known_as = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    command.add_argument("--name", default=known_as, help=f"what the record calls this machine (default: {known_as})")
    command.add_argument(
        "--pretend-clock-ms", type=float, default=0.0, help="for tests: say that this machine's clock is so much ahead"
    )
    arguments = command.parse_args(argv)
    about = {
        "name": arguments.name,
        "cores": len(os.sched_getaffinity(0)),
        "pretended_s": arguments.pretend_clock_ms / 1e3,
    }
    try:
        with connect(arguments.contact, arguments.wait_s, about) as line:
            Worker(line, round(arguments.pretend_clock_ms * 1e6)).serve()
    except HarnessError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
