"""The measuring process: keeps requests in flight and stamps what arrives; understands nothing of it.

Run as `python -m harness.load.reader JOB` by `harness.load.client`, one process or several, so that no other thread,
large heap or parser shares the interpreter whose time is being measured. While the clock runs, an event costs one
`recvmsg`, one clock read and one append; what the bytes mean is worked out afterwards by `harness.load.transcript`.

Talk with the parent: a line `ready` on stdout once connections are open; `go NANOSECONDS` on stdin starts the level at
that wall-clock instant; `stop` (or the end of stdin) ends it at once; one JSON line of counts every half second; a
last JSON line with `cpu_s` and the rest. What was read lies in the spool, a file of marshalled tuples,
each after its length in eight bytes:

    (index, play, slot, facts, log)     facts: dict of times and how it ended, None while more of its log follows
    log: [(answer of recvmsg, nanoseconds when it was read, not before), ...]

`not before` bounds the earlier events of those that have one stamp. Of a process that was awake it is the time the
poll before returned: what had arrived by then, that poll would have named. One that slept was woken by the first of
them, and ran again after the scheduler let it: there it is as long before it ran as it had waited for a core, which
schedstat says, or the time it fell asleep where the kernel keeps no schedstat.

A read has the stamp of the last segment that it took from. One that comes late may find several events of a stream;
it then takes them one by one, since the kernel keeps each segment and its stamp until they are read, unless it has
joined them: it does so with a segment that it has acknowledged already, 40 ms after it came at the latest.

All times are CLOCK_REALTIME nanoseconds, because that is the kernel's clock for receive stamps.
"""

import bisect
import contextlib
import errno
import gc
import json
import marshal
import mmap
import os
import re
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from harness.load.wire import Framer, WireError

READ = 1 << 16
ANCILLARY = 128
# linux/socket.h and linux/net_tstamp.h; Python's socket module has no names for these.
SO_TIMESTAMPING = 37
RX_SOFTWARE = 1 << 3
SOFTWARE = 1 << 4

_IN, _OUT = 1, 4  # select.EPOLLIN, select.EPOLLOUT
_PIECES = 200_000  # reads kept in memory before all logs go to the spool: about 100 MB
_IDLE_PIECES = 50_000  # reads kept in memory before idle moments are spent on spooling
_BACKLOG = 4_000  # finished requests kept before the spool takes one whether or not there is time
_AT_ONCE = 64  # connections being opened at a time before the clock starts
_PROGRESS_NS = 500_000_000
_ASLEEP_NS = 20_000  # a poll that took longer had to wait for the first bytes
_LATE_NS = 1_000_000  # bytes that may have waited longer are read event by event
_APART_NS = 1_000_000  # events of a stream that come faster than this, on average, are read together all the same
_NEVER = 1 << 63
_NAP_S = 0.000_2  # between two polls, while chunks come often
_OFTEN_S = 4_000  # reads a second from which on they do
_LONG = 20  # reads a request from which on its successor may wait for a nap
_STAMPS_SOON_S = 0.2
_EVENT_END = b"\n\r\n"  # the end of an event that an HTTP chunk ends with
_LAST = b"\r\n0\r\n\r\n"  # how a chunked stream ends: the last chunk, and no trailers
_LAST_AND_MORE = re.compile(rb"\r\n0+[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n:]+:[^\r\n]*\r\n)*\r\n\Z")  # how it may end
_LAST_PIECES = 8  # reads in which that is looked for, of a stream whose beginning is in the spool
_BACK_OFF_NS = 100_000_000
_GIVE_UP = 3  # failed connects in a row after which a slot stays empty

_clock = time.time_ns


class Slot:
    """One connection and the request it carries."""

    __slots__ = (
        "answers",
        "blind",
        "connect_began",
        "connect_s",
        "exact",
        "failures",
        "fd",
        "fed",
        "framer",
        "fresh",
        "index",
        "log",
        "missing",
        "number",
        "out",
        "play",
        "receive",
        "retried",
        "scheduled",
        "sent",
        "serial",
        "sock",
        "state",
        "waited",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.sock: Any = None
        self.fd = -1
        self.receive: Callable[..., Any] = _nothing
        self.state = "closed"  # closed, connecting, handshake, idle, sending, waiting
        self.log: list[Any] = []
        self.out: memoryview | None = None
        self.framer: Framer | None = None
        self.exact = False
        self.blind = False
        self.fed = 0
        self.play: Iterator[int] = iter(())
        self.answers: list[str] = []  # of this play's conversation, where they are to be sent back
        self.missing = 0
        self.index = -1
        self.serial = 0
        self.sent = 0
        self.scheduled: int | None = None
        self.waited: int | None = None
        self.connect_began = 0
        self.connect_s: int | None = None
        self.failures = 0
        self.fresh = True
        self.retried = 0


def _nothing(*_: int) -> Any:
    raise BlockingIOError


def _when(pause: tuple[int, Slot]) -> int:
    return pause[0]


class Reader:
    """One process's share of a level."""

    def __init__(self, job: dict[str, Any], spool: BinaryIO) -> None:
        self.job = job
        self.spool = spool
        self.epoll = select.epoll()
        self.slots: dict[int, Slot] = {}
        self.requests = _Requests(job["requests"])
        self.plays = _plays(job)
        self.due: deque[tuple[int, int]] = deque()
        self.idle: list[Slot] = []
        self.deadlines: deque[tuple[int, Slot, int]] = deque()
        self.paused: deque[tuple[int, Slot]] = deque()
        self.finished: deque[tuple[Any, ...]] = deque()
        self.active = 0
        self.stopping = False
        self.until = 0
        self.polled = 0
        self.before = 0
        self.schedstat = _open_schedstat()
        self.waited = self._waited() if self.schedstat >= 0 else 0
        self.kept = 0
        self.most = _PIECES
        self.turn: list[Slot] = []
        self.reads = 0
        self.nap_s = 0.0
        self.paced = (0, 0)  # reads and ended requests when the pace was last looked at
        self.worked = 0  # nanoseconds of CPU time by then
        self.busiest: float | None = None  # the largest share of a core taken between two looks
        self.sent = 0
        self.done = 0
        self.failed = 0
        self.reconnects = 0
        self.created = 0
        self.context = _context(job)
        self.answers = _answers(job)
        self.timeout_ns = int(job["request_timeout_s"] * 1e9)

    # Connections

    def open_all(self, count: int) -> None:
        """Open the first connections, a few at a time, before the clock starts."""
        waiting = [self._new_slot() for _ in range(count)]
        opening: set[Slot] = set()
        while waiting or opening:
            while waiting and len(opening) < _AT_ONCE:
                slot = waiting.pop()
                self._connect(slot)
                opening.add(slot)
            for fd, _ in self.epoll.poll(self.job["connect_timeout_s"], 256) or [(-1, 0)]:
                if fd < 0:
                    raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                slot = self.slots[fd]
                self._connected(slot)
                if slot.state == "idle":
                    opening.discard(slot)
        if self.job["stamps"]:
            await_stamps()

    def _new_slot(self) -> Slot:
        slot = Slot(self.job["process"] + self.created * self.job["processes"])
        self.created += 1
        return slot

    def _connect(self, slot: Slot) -> None:
        family, address = self.job["family"], tuple(self.job["address"])
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The receive buffer is the kernel's to tune (tcp_rmem, 6 MB): setting it would cap it at rmem_max (208 kB).
        if self.job["stamps"]:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE)
        slot.sock, slot.fd, slot.receive = sock, sock.fileno(), sock.recvmsg
        slot.state, slot.fresh, slot.connect_began = "connecting", True, _clock()
        self.slots[slot.fd] = slot
        error = sock.connect_ex(address)
        if error not in {0, errno.EINPROGRESS}:
            raise OSError(error, os.strerror(error))
        self.epoll.register(slot.fd, _OUT)

    def _connected(self, slot: Slot) -> None:
        """The socket became writable: connected, failed, or a step further in the TLS handshake."""
        if slot.state == "connecting":
            error = slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if self.context is not None:
                slot.sock = self.context.wrap_socket(
                    slot.sock, server_hostname=self.job["server_name"], do_handshake_on_connect=False
                )
                slot.receive = _secure(slot)
                slot.state = "handshake"
        if slot.state == "handshake" and not self._shake(slot):
            return
        slot.state = "idle"
        slot.connect_s = _clock() - slot.connect_began
        slot.failures = 0
        self.epoll.modify(slot.fd, _IN)

    def _shake(self, slot: Slot) -> bool:
        import ssl  # noqa: PLC0415 - half of the start-up time, and only for TLS

        try:
            slot.sock.do_handshake()
        except ssl.SSLWantReadError:
            self.epoll.modify(slot.fd, _IN)
            return False
        except ssl.SSLWantWriteError:
            self.epoll.modify(slot.fd, _OUT)
            return False
        return True

    def _close(self, slot: Slot) -> None:
        if slot.fd >= 0:
            self.slots.pop(slot.fd, None)
            with contextlib.suppress(OSError, ValueError):
                self.epoll.unregister(slot.fd)
            with contextlib.suppress(OSError):
                slot.sock.close()
        slot.fd, slot.state, slot.receive = -1, "closed", _nothing

    # The level

    def run(self, start_ns: int) -> None:
        """The whole level, from `start_ns` until the last request ended or the parent said stop."""
        job = self.job
        self.start = start_ns
        self.until = start_ns + int(job["duration_s"] * 1e9) if job["duration_s"] is not None else 0
        self.epoll.register(0, _IN)
        while (left := start_ns - _clock()) > 0:
            time.sleep(left / 1e9)
        self.before = self.polled = _clock()
        self.worked = time.process_time_ns()
        if job["mode"] == "closed":
            self._ramp()
        else:
            self.due = deque((start_ns + offset, index) for offset, index in job["schedule"])
            self.idle = [slot for slot in self.slots.values() if slot.state == "idle"]
        self._loop()
        while self.finished:
            self._spool_one()

    def _ramp(self) -> None:
        slots = sorted(self.slots.values(), key=lambda slot: slot.number)
        ramp = int(self.job["ramp_up_s"] * 1e9)
        total = max(self.job["concurrency"], 1)
        for slot in slots:
            if ramp and slot.number:
                self.paused.append((self.start + ramp * slot.number // total, slot))
            else:
                self._next(slot)

    def _loop(self) -> None:  # noqa: PLR0912, PLR0915 - a call costs as much as an event
        poll, clock, select_now, sleep = self.epoll.poll, _clock, select.select, time.sleep
        # With stamps, `before` need be no better than the patience with late bytes; reading schedstat costs a call.
        patience, asleep = (_LATE_NS, _LATE_NS) if self.job["stamps"] else (_NEVER, _ASLEEP_NS)
        slots, finished, listening = self.slots, self.finished, [self.epoll.fileno()]
        # What has to stay, the last pieces of streams and answers to be sent back, is no reason not to sleep.
        roomy = max(_IDLE_PIECES, 4 * len(slots)) if self.answers is None else _NEVER
        tick, report = self.polled, self.polled + _PROGRESS_NS  # the first look sets the next tick
        while self.active or self.due or self.paused:
            spools = bool(finished) or self.kept > roomy
            naps = self.nap_s and not self.due and not self.paused
            if naps:
                if spools:  # now, as no moment will be idle
                    self._spool_some()
                    spools = False
                sleep(self.nap_s)
            before, asked, wait = self.polled, clock(), 0.0
            if spools:
                pass
            elif self.due or self.paused:
                # epoll counts in milliseconds; select on the epoll descriptor waits in microseconds.
                select_now(listening, (), (), self._wait(report))
            elif tick > asked:
                wait = (tick - asked) / 1e9
            ready = poll(wait, len(slots) + 8)
            self.polled = polled = clock()
            # What came during a nap did not wake the poll after it, and one that does not wait was not asleep.
            if polled - asked > _ASLEEP_NS and not naps and not spools:
                before = asked
                if polled - asked > asleep and self.schedstat >= 0:
                    waited, self.waited = self.waited, self._waited()
                    before = max(asked, polled - (self.waited - waited))
            self.before, now, late = before, polled, before + patience
            for fd, event in ready:
                slot = slots.get(fd)
                if slot is None or event & _OUT or slot.state != "waiting":
                    self._unusual(fd, slot, event)
                    continue
                try:
                    if now > late and not slot.exact:
                        self._read_apart(slot)
                        continue
                    answer = slot.receive(READ, ANCILLARY)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._lost(slot, error)
                    continue
                data, log, now = answer[0], slot.log, clock()
                log.append((answer, now, before))
                if data[-4:] == b"\r\n\r\n" or slot.exact or len(data) < 8 or len(log) == 1:
                    self._progress(slot, data)
            count = len(ready)
            self.reads += count
            self.kept += count
            if (wait == 0.0 and not count) or len(finished) > _BACKLOG:
                self._spool_some()
            if polled >= tick or self.due or self.paused:
                self._timers()
                if polled >= report:
                    self._report()
                    self._pace(polled - report + _PROGRESS_NS)
                    report = polled + _PROGRESS_NS
                tick = min(report, self.deadlines[0][0] if self.deadlines else polled + self.timeout_ns)
            if self.kept > self.most:
                self._spool_all()
            if self.stopping:
                self._abandon()

    def _pace(self, span_ns: int) -> None:
        """How busy this process was in the last `span_ns`, and whether to nap before each poll from now on.

        Where chunks come every few dozen microseconds, waking for each costs more than reading it. The kernel stamps
        them all the same, so a nap makes them later read, not later known; and an ended request's successor waits for
        it, which is nothing beside a request of many chunks.
        """
        worked, self.worked = self.worked, time.process_time_ns()
        self.busiest = max(self.busiest or 0.0, (self.worked - worked) / span_ns)
        reads, ends = self.reads - self.paced[0], self.done + self.failed - self.paced[1]
        self.paced = (self.reads, self.done + self.failed)
        often = reads * 1e9 > _OFTEN_S * span_ns and reads > _LONG * ends
        stamped = any(slot.log and slot.log[-1][0][1] for slot in self.slots.values())  # asking for them is not enough
        self.nap_s = _NAP_S if often and stamped else 0.0

    def _waited(self) -> int:
        """How long this process has waited for a core in its life, in nanoseconds: the second number of schedstat."""
        return int(os.pread(self.schedstat, 64, 0).split(b" ", 2)[1])

    def _wait(self, report: int) -> float:
        """Seconds until something is due."""
        soonest = report
        if self.due and (self.idle or self._may_grow()):
            soonest = min(soonest, self.due[0][0])
        if self.paused:
            soonest = min(soonest, self.paused[0][0])
        if self.deadlines:
            soonest = min(soonest, self.deadlines[0][0])
        return max(0.0, (soonest - _clock()) / 1e9)

    def _may_grow(self) -> bool:
        limit = self.job["concurrency"]
        return limit is None or self.created < limit

    def _timers(self) -> None:
        now = _clock()
        while self.deadlines and (self.deadlines[0][1].serial != self.deadlines[0][2] or self.deadlines[0][0] <= now):
            _, slot, serial = self.deadlines.popleft()
            if slot.serial == serial and slot.state not in {"idle", "closed"}:
                self._fail(slot, "timeout", f"no end within {self.timeout_ns / 1e9:g} s")
        while self.paused and self.paused[0][0] <= now:
            _, slot = self.paused.popleft()
            self._next(slot)
        while self.due and self.due[0][0] <= now and (self.idle or self._may_grow()):
            due, index = self.due.popleft()
            slot = self.idle.pop() if self.idle else self._new_slot()
            slot.scheduled = due
            # What kept it waiting was the cap on open requests only if one was reached.
            slot.waited = max(0, now - due) if self.job["concurrency"] is not None else None
            slot.play = iter(())
            self._begin(slot, index)

    def _next(self, slot: Slot) -> None:
        """Give a slot its next request, or leave it empty for good."""
        if self.stopping:
            return
        if self.job["mode"] == "open":
            slot.scheduled = None
            index = next(slot.play, None)
            if index is None:
                self.idle.append(slot)
                return
        else:
            index = next(slot.play, None)
            while index is None:
                if self.until and _clock() >= self.until:
                    return
                play = next(self.plays, None)
                if play is None:
                    return
                slot.play, slot.answers = iter(play), []
                index = next(slot.play, None)
        self._begin(slot, index)

    def _begin(self, slot: Slot, index: int) -> None:
        slot.index, slot.retried = index, 0
        self.active += 1
        self._start(slot)

    def _start(self, slot: Slot) -> None:
        slot.log, slot.framer, slot.exact, slot.blind, slot.fed = [], None, False, False, 0
        slot.serial += 1
        if slot.state == "idle":
            self._send(slot)
            return
        self.reconnects += slot.sent > 0
        slot.sent = _clock()
        self.deadlines.append((slot.sent + self.timeout_ns, slot, slot.serial))
        try:
            self._connect(slot)
        except OSError as error:
            self._refused(slot, error)

    def _send(self, slot: Slot) -> None:
        data = self.requests[slot.index]
        if self.answers is not None:
            data, slot.missing = self.answers.filled(data, slot.answers)
        slot.state = "waiting"
        slot.sent = now = _clock()
        self.deadlines.append((now + self.timeout_ns, slot, slot.serial))
        self.sent += 1
        self._write(slot, data)

    def _write(self, slot: Slot, data: Any) -> None:
        try:
            count = slot.sock.send(data)
        except BlockingIOError:
            count = 0
        except ConnectionError:
            # A server may refuse a request before it has read it all: what it said is still there to be read.
            slot.out = None
            self.epoll.modify(slot.fd, _IN)
            return
        except OSError as error:
            if type(error).__name__ in {"SSLWantWriteError", "SSLWantReadError"}:
                count = 0
            else:
                self._lost(slot, error)
                return
        if count < len(data):
            slot.out = memoryview(data)[count:]
            self.epoll.modify(slot.fd, _IN | _OUT)
        elif slot.out is not None:
            slot.out = None
            self.epoll.modify(slot.fd, _IN)

    def _unusual(self, fd: int, slot: Slot | None, event: int) -> None:
        """Anything but bytes for a request that waits for them."""
        if fd == 0:
            self._command()
            return
        if slot is None or slot.fd != fd:
            return
        if slot.state in {"connecting", "handshake"}:
            try:
                self._connected(slot)
            except OSError as error:
                self._refused(slot, error)
                return
            if slot.state == "idle":
                self._send(slot)
        elif slot.state == "idle":
            # A server may end an idle connection whenever it likes; the next request opens a new one.
            self._close(slot)
        elif slot.state == "waiting":
            if event & _OUT and slot.out is not None:
                self._write(slot, slot.out)
            if event & ~_OUT and slot.state == "waiting":
                self._read(slot)

    def _read_apart(self, slot: Slot) -> None:
        """Read what has come event by event, so that each has its own stamp; what came in a rush, in one."""
        serial = slot.serial
        here = slot.sock.recv(READ, socket.MSG_PEEK)
        since = slot.log[-1][1] if slot.log else slot.sent
        apart = here.count(_EVENT_END) * _APART_NS < self.polled - since
        begin = 0
        while slot.serial == serial and begin < max(1, len(here)):
            end = here.find(_EVENT_END, begin) + len(_EVENT_END) if apart else 0
            if end < len(_EVENT_END):
                end = len(here)
            answer = slot.receive(max(1, end - begin), ANCILLARY)
            data = answer[0]
            slot.log.append((answer, _clock(), self.before))
            self.reads += begin > 0
            self.kept += begin > 0
            begin = end + (not data)
            if data[-4:] == b"\r\n\r\n" or slot.exact or len(data) < 8 or len(slot.log) == 1:
                self._progress(slot, data)

    def _read(self, slot: Slot) -> None:
        try:
            answer = slot.receive(READ, ANCILLARY)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(slot, error)
            return
        slot.log.append((answer, _clock(), self.before))
        self._progress(slot, answer[0])

    def _command(self) -> None:
        line = os.read(0, 4096)
        if not line:
            self.epoll.unregister(0)
        self.stopping = True

    # The end of a request

    def _progress(self, slot: Slot, data: bytes) -> None:
        """Whether these bytes end the response; the exact framer is asked only when they may."""
        log = slot.log
        if not data:
            self._ended(slot)
            return
        if len(log) == 1:
            end = data.find(b"\r\n\r\n")
            slot.exact = end < 0 or b"\r\ntransfer-encoding: chunked" not in data[: end + 2].lower()
            if not slot.exact and len(data) == end + 4:
                return
        if not slot.exact:
            # The last chunk, and nothing after it: an event stream holds no line `0` but this one.
            if data.endswith(_LAST) or (len(data) < len(_LAST) and _joined(log, _tail(log)).endswith(_LAST)):
                self._finish(slot, closes=False)
                return
            if data[-4:] != b"\r\n\r\n" and len(data) >= 8:
                return
            if slot.blind:
                if _LAST_AND_MORE.search(_joined(log, min(len(log), _LAST_PIECES))):
                    self._finish(slot, closes=False)
                return
        try:
            if self._frame(slot):
                self._finish(
                    slot, closes=slot.framer is not None and slot.framer.head is not None and slot.framer.head.closes
                )
        except WireError as error:
            self._fail(slot, "malformed", str(error))

    def _frame(self, slot: Slot) -> bool:
        """Feed the exact framer what it has not seen."""
        if slot.framer is None:
            slot.framer = Framer()
        log, done = slot.log, slot.framer.done
        for position in range(slot.fed, len(log)):
            done = slot.framer.feed(log[position][0][0])
        slot.fed = len(log)
        return done

    def _ended(self, slot: Slot) -> None:
        """The server closed the connection."""
        slot.log.pop()
        slot.fed = min(slot.fed, len(slot.log))
        if slot.blind:
            self._lost(slot, None)
            return
        try:
            whole = bool(slot.log or slot.framer) and (
                self._frame(slot) or (slot.framer is not None and slot.framer.closed())
            )
        except WireError as error:
            self._fail(slot, "malformed", str(error))
            return
        if whole:
            self._finish(slot, closes=True)
        else:
            self._lost(slot, None)

    def _finish(self, slot: Slot, *, closes: bool) -> None:
        if len(slot.log) and not closes and slot.framer is None:
            closes = b"\r\nconnection: close" in slot.log[0][0][0][:2048].lower()
        if slot.out is not None:  # answered before it was all sent: on this connection the rest is still expected
            slot.out, closes = None, True
        entry = self._entry(slot, None, None)
        if self.answers is not None:
            slot.answers.append(self.answers.content(slot.log))
        self.active -= 1
        self.done += 1
        slot.serial += 1
        slot.fresh = False
        slot.connect_s = None
        if closes:
            self._close(slot)
        else:
            slot.state = "idle"
        self._next(slot)
        self.finished.append(entry)

    def _entry(self, slot: Slot, reason: str | None, detail: str | None) -> tuple[Any, ...]:
        log = slot.log
        facts = {
            "sent": slot.sent,
            "end": log[-1][1] if log and reason is None else _clock(),
            "scheduled": slot.scheduled,
            "queued": slot.waited,
            "connect": slot.connect_s,
            "reason": reason,
            "detail": detail,
            "retried": slot.retried,
        }
        if self.answers is not None:
            facts["missing"] = slot.missing
        return (slot.index, slot.serial, slot.number, facts, log)

    def _lost(self, slot: Slot, error: OSError | None) -> None:
        """The connection broke, or ended before its response did."""
        if not slot.log and not slot.framer and not slot.fresh and not slot.retried and not self.stopping:
            # It was kept alive from an earlier request, and the server had ended it before it saw this one.
            self._close(slot)
            slot.retried = 1
            self._start(slot)
            return
        said = error.strerror or str(error) if error else "the server closed the connection before the end"
        self._fail(slot, "disconnected", said)

    def _refused(self, slot: Slot, error: OSError) -> None:
        slot.failures += 1
        self._fail(slot, "connect", error.strerror or str(error))

    def _fail(self, slot: Slot, reason: str, detail: str) -> None:
        entry = self._entry(slot, reason, detail)
        self.finished.append(entry)
        self.active -= 1
        self.failed += 1
        slot.serial += 1
        slot.out = None
        slot.play = iter(())  # a conversation does not go on after a lost turn
        failures = slot.failures
        self._close(slot)
        if not failures or self.job["mode"] == "open":  # whose requests are due whatever the server does
            self._next(slot)
        elif failures < _GIVE_UP:
            bisect.insort(self.paused, (_clock() + _BACK_OFF_NS, slot), key=_when)

    def _abandon(self) -> None:
        """Stop at once: close what is open, so that the server sees its clients leave."""
        self.due.clear()
        self.paused.clear()
        for slot in list(self.slots.values()):
            if slot.state == "idle":
                self._close(slot)
            else:
                self._fail(slot, "stopped", "the level was stopped")

    # Out of the process

    def _spool_one(self) -> None:
        entry = self.finished.popleft()
        _keep(self.spool, entry)
        self.kept -= len(entry[4])

    def _spool_slot(self, slot: Slot) -> None:
        """What a request has read so far, but for the last pieces, which tell whether its end was split."""
        rest = _tail(slot.log)
        if slot.state != "waiting" or len(slot.log) < rest + 2 or self.answers is not None:
            return
        if slot.exact or slot.framer is not None:
            with contextlib.suppress(WireError):
                self._frame(slot)
            slot.fed = rest
        else:
            # The exact framer can no longer start; the end of an ordinary stream is known by its last bytes.
            slot.blind = True
        _keep(self.spool, (slot.index, slot.serial, slot.number, None, slot.log[:-rest]))
        self.kept -= len(slot.log) - rest
        slot.log = slot.log[-rest:]

    def _spool_some(self) -> None:
        """One request's log, in turn: memory stays bounded however many streams are open, and nobody waits long."""
        if self.finished:
            self._spool_one()
            return
        if not self.turn:
            self.turn = list(self.slots.values())
        if self.turn:  # while every slot waits for a server that refuses connections, there is none
            self._spool_slot(self.turn.pop())

    def _spool_all(self) -> None:
        while self.finished:
            self._spool_one()
        for slot in self.slots.values():
            self._spool_slot(slot)
        self.kept = sum(len(slot.log) for slot in self.slots.values())
        self.most = max(_PIECES, 2 * self.kept)  # streams are not all gone through again for what has to stay

    def _report(self) -> None:
        self.spool.flush()  # for whoever looks meanwhile, or afterwards should we be killed; less than a full buffer
        _say({"sent": self.sent, "done": self.done, "failed": self.failed, "active": self.active, "reads": self.reads})


def _keep(spool: BinaryIO, entry: tuple[Any, ...]) -> None:
    """One entry: its length, then itself. `marshal.load` would read a file without lengths item by item."""
    data = marshal.dumps(entry)
    spool.write(struct.pack("<Q", len(data)) + data)


def await_stamps() -> None:
    """Wait until the kernel stamps what it receives: the first socket that asks for it only makes it begin to, soon."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE)
        own.settimeout(_STAMPS_SOON_S)
        own.bind(("127.0.0.1", 0))
        until = time.monotonic() + _STAMPS_SOON_S
        while time.monotonic() < until:
            own.sendto(b"?", own.getsockname())
            if own.recvmsg(1, ANCILLARY)[1]:
                return
            time.sleep(0.001)


def _open_schedstat() -> int:
    try:
        return os.open("/proc/self/schedstat", os.O_RDONLY)
    except OSError:
        return -1


def _tail(log: list[Any]) -> int:
    """How many of the last pieces are needed to see whether a stream ended: servers write its last bytes apart."""
    size = count = 0
    while count < len(log) and size < len(_LAST):
        count += 1
        size += len(log[-count][0][0])
    return count


def _joined(log: list[Any], count: int) -> bytes:
    return b"".join(piece[0][0] for piece in log[-count:])


def _secure(slot: Slot) -> Callable[..., Any]:
    """`recvmsg` for TLS: one read of whatever is decrypted; no kernel stamp, as records hide the segments."""
    import ssl  # noqa: PLC0415

    def receive(size: int, _ancillary: int) -> tuple[bytes, list[Any], int, None]:
        pieces = []
        while True:
            try:
                piece = slot.sock.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except ssl.SSLEOFError:
                piece = b""
            pieces.append(piece)
            if not piece or not slot.sock.pending():
                break
        if not pieces:
            raise BlockingIOError
        return b"".join(pieces), [], 0, None

    return receive


def _context(job: dict[str, Any]) -> Any:
    if not job["tls"]:
        return None
    import ssl  # noqa: PLC0415

    context = ssl.create_default_context(cafile=job["ca_file"])
    context.set_alpn_protocols(["http/1.1"])
    if job["insecure"]:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _answers(job: dict[str, Any]) -> Any:
    """What puts answers into the next turns; None for a level that does without, and starts sooner."""
    if not job["served"]:
        return None
    from harness.load import answers  # noqa: PLC0415

    return answers


class _Requests:
    """The level's request bytes, mapped from one file that all processes share."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as stream:  # noqa: PTH123 - pathlib costs start-up time
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        (count,) = struct.unpack_from("<Q", self._map, 0)
        self._offsets = struct.unpack_from(f"<{count + 1}Q", self._map, 8)
        self._count = count

    def __getitem__(self, index: int) -> bytes:
        position = index % self._count
        return self._map[self._offsets[position] : self._offsets[position + 1]]


def _plays(job: dict[str, Any]) -> Iterator[list[int]]:
    """What this process's slots play, in order: lists of request indices.

    With a count, processes draw plays from one file of tickets: its shared offset hands each out exactly once.
    """
    plays, count = job["plays"], len(job["plays"])
    if job["tickets"] is None:
        rounds, position = divmod(job["process"], count)
        while True:
            first = rounds * job["indices"]
            yield [first + index for index in plays[position]]
            step = position + job["processes"]
            rounds, position = rounds + step // count, step % count
    while len(ticket := os.read(job["tickets"], 8)) == 8:
        yield plays[struct.unpack("<Q", ticket)[0]]


def _say(value: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: what was read is still to be spooled
        os.write(1, json.dumps(value).encode() + b"\n")


def main() -> int:
    """One share of one level, as the job file says."""
    with open(sys.argv[1], "rb") as stream:  # noqa: PTH123
        job = marshal.load(stream)
    try:
        return _measure(job)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
            raise
        _say({"error": error.strerror})
        return 1


def _measure(job: dict[str, Any]) -> int:
    if job["cpu"] is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {job["cpu"]})
    _raise_limits()
    with open(job["spool"], "wb", buffering=1 << 20) as spool:  # noqa: PTH123
        reader = Reader(job, spool)
        try:
            reader.open_all(job["open_first"])
        except OSError as error:
            _say({"error": error.strerror or str(error), "errno": error.errno, "open": len(reader.slots)})
            return 1
        _say({"ready": True})
        line = os.read(0, 100).split()
        if len(line) != 2:
            return 0
        gc.collect()
        gc.freeze()
        gc.disable()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        reader.run(int(line[1]))
        spent = resource.getrusage(resource.RUSAGE_SELF)
        wall = _clock() - int(line[1])
    cpu = spent.ru_utime + spent.ru_stime - usage.ru_utime - usage.ru_stime
    _say(
        {
            "cpu_s": cpu,
            "busiest": reader.busiest,
            "wall_s": wall / 1e9,
            "reads": reader.reads,
            "reconnects": reader.reconnects,
            "stopped": reader.stopping,
        }
    )
    return 0


def _raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
