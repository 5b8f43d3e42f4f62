"""Offer a load to a server and bring back what happened: `run_level`.

The measuring is done by `harness.load.reader` in processes of its own; this side writes the job, tells them when to
start, and afterwards understands what they read (`harness.load.transcript`) and merges it into one trace.
"""

import errno
import json
import marshal
import math
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from harness.errors import HarnessError, InputError, ServerError
from harness.load import answers, spool, transcript, wire
from harness.load.records import ClientFacts, LevelTrace, RequestRecord
from harness.load.transcript import Prepared, TokenCounter

_OUR_LIMITS = {
    errno.EMFILE: "`ulimit -Hn` says how many files a process may have open: raise it, or lower the concurrency",
    errno.ENFILE: "`fs.file-max` says how many files may be open: raise it, or lower the concurrency",
    errno.EADDRNOTAVAIL: "`net.ipv4.ip_local_port_range` has no ports left: widen it, or lower the concurrency",
}
Mode = Literal["closed", "open", "serial"]
Progress = Callable[..., None]  # called with counts by name: sent, done, failed, active, reads


class StopSignal(Protocol):
    """What tells a running level to stop: a `threading.Event` or a `multiprocessing.Event`."""

    def is_set(self) -> bool:
        """Whether to stop now."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens. With `tls`, stamps are read times, as records hide the segments' own."""

    host: str
    port: int
    tls: bool = False
    ca_file: str | None = None
    insecure: bool = False  # TLS without checking the certificate
    connect_timeout_s: float = 10.0
    headers: Mapping[str, str] = field(default_factory=dict)  # sent with every request: authorization ...


@dataclass(frozen=True, slots=True)
class Load:
    """One level's load.

    Closed: `concurrency` slots, each sends its next request when the last ended. Serial: closed with one slot.
    Open: requests are sent when they are due at `rate` a second, whatever the server does; `concurrency` then caps the
    requests in flight (None: no cap), and a request that waits for the cap records how long (`queued_s`).

    The level ends after `requests` measured requests, or when `duration_s` is over, or at the first of both. The first
    `warmup_requests` are marked as warm-up and hand over to the measured ones without a pause, unless `drain_warmup`.
    `burstiness` is the shape of the gamma distribution of arrivals: 1 is Poisson, less is burstier, None is constant.
    """

    mode: Mode = "closed"
    concurrency: int | None = 1
    requests: int | None = None
    duration_s: float | None = None
    rate: float | None = None
    burstiness: float | None = 1.0
    ramp_up_s: float = 0.0
    warmup_requests: int = 0
    drain_warmup: bool = False
    request_timeout_s: float = 600.0
    processes: int | None = None
    cpus: tuple[int, ...] | None = (
        None  # cores for the measuring processes; None: chosen where there are cores to spare
    )
    seed: int = 0
    keep_text: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a level's measuring processes are here: `here` of them, from number `first`, of `total` everywhere.

    Slots, plays and arrivals are dealt out by a process's number, so that machines need not talk while they measure.
    """

    first: int
    here: int
    total: int


def run_level(
    target: Target,
    load: Load,
    requests: Sequence[Prepared],
    *,
    on_record: Callable[[RequestRecord], None] | None = None,
    stop: StopSignal | None = None,
    progress: Progress | None = None,
    count_tokens: TokenCounter | None = None,
    folder: Path | None = None,
) -> LevelTrace:
    """Run one level and understand what came back.

    Args:
        target: the server.
        load: how to load it.
        requests: what to send, in order; used again from the start when the level needs more (`client.wrapped`).
        on_record: called with each record when it has been understood, after the clock has stopped.
        stop: ends the level at once when set; what was in flight is recorded as stopped.
        progress: called about twice a second with counts: sent, done, failed, active, reads.
        count_tokens: name and function of a tokenizer, for servers that do not count.
        folder: where the measuring processes keep what they read while the clock runs; made here, and gone when every
            record has been understood. If this process is killed before, `spool.recover` has what had arrived. None:
            a temporary folder, which nobody finds again.

    Records are made after the clock has stopped, because making them costs CPU time that on a small machine would be
    taken from the readers and the server; until then each finished request lies, as it was read, in `folder`.

    Raises:
        InputError: the load makes no sense (says every fault), or `folder` cannot be written.
        ServerError: no connection could be opened.
    """
    check(load, requests)
    if load.drain_warmup and load.warmup_requests:
        return drained(
            run_level,
            target,
            load,
            requests,
            on_record=on_record,
            stop=stop,
            progress=progress,
            count_tokens=count_tokens,
            folder=folder,
        )
    with _place(folder) as place, ExitStack() as closing:
        level = Level(target, load, requests, place)
        closing.callback(level.end)
        level.open()
        level.go()
        level.watch(stop, progress)
        return level.trace(on_record, count_tokens)


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """A level's own folder; it is dropped when all went well, and kept for `spool.recover` otherwise."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="harness-load-") as temporary:
            yield Path(temporary)
        return
    folder.mkdir(mode=0o700)
    yield folder
    spool.remove(folder)


def default_processes(load: Load) -> int:
    """Enough processes for the load, never all cores: one for 256 streams, at most a quarter of the cores."""
    streams = load.concurrency or math.ceil(load.rate or 1)
    return max(1, min(math.ceil(streams / 256), len(os.sched_getaffinity(0)) // 4))


def check(load: Load, requests: Sequence[Prepared]) -> None:
    """Refuse a load that makes no sense.

    Raises:
        InputError: every fault at once.
    """
    faults = []
    if not requests:
        faults.append("there are no requests to send")
    if load.requests is None and load.duration_s is None:
        faults.append("a level needs a number of requests or a duration")
    if load.requests is not None and load.requests < 1:
        faults.append(f"requests is {load.requests}")
    if load.mode == "open" and not (load.rate and load.rate > 0):
        faults.append(f"an open loop needs a rate above zero, got {load.rate}")
    if load.mode == "closed" and not (load.concurrency and load.concurrency > 0):
        faults.append(f"a closed loop needs a concurrency above zero, got {load.concurrency}")
    if load.burstiness is not None and load.burstiness <= 0:
        faults.append(f"burstiness is above zero, got {load.burstiness}")
    if load.mode == "open" and any(answers.are_wanted(prepared.body) for prepared in requests):
        faults.append("conversations go on with the server's own answers, which an open loop does not wait for")
    if load.request_timeout_s <= 0:
        faults.append(f"a request timeout is above zero, got {load.request_timeout_s}")
    if faults:
        raise InputError(
            faults[0] if len(faults) == 1 else f"{len(faults)} faults in a level's load", details=faults[1:] and faults
        )


def drained(
    run: Callable[..., LevelTrace], target: Target, load: Load, requests: Sequence[Prepared], **callbacks: Any
) -> LevelTrace:
    """Warm-up to its end, then the measured requests, each by `run`; warm-up times count backwards from the start."""
    warm = replace(load, requests=load.warmup_requests, warmup_requests=0, drain_warmup=False, duration_s=None)
    before = run(target, warm, requests, **{**callbacks, "on_record": None, "folder": None})
    if before.stopped:
        return before
    rest = [requests[(load.warmup_requests + index) % len(requests)] for index in range(len(requests))]
    level = run(target, replace(load, warmup_requests=0, drain_warmup=False), rest, **callbacks)
    shift = before.started_at - level.started_at
    early = [replace(transcript.shifted(record, shift), phase="warmup") for record in before.records]
    late = [replace(record, index=record.index + load.warmup_requests) for record in level.records]
    for record in early:
        if callbacks["on_record"]:
            callbacks["on_record"](record)
    return replace(level, records=(*early, *late))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Start a process that no Ctrl-C meets, not even before it has a session of its own: it inherits the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Level:
    """The processes of one level on this machine, and their files: `open`, `go`, `watch`, `trace`, and always `end`.

    Args:
        target, load, requests: as for `run_level`; the warm-up is not drained.
        folder: where the processes keep what they read.
        share: which part of the level this machine plays; None: all of it.
    """

    def __init__(
        self, target: Target, load: Load, requests: Sequence[Prepared], folder: Path, share: Share | None = None
    ) -> None:
        self.target = target
        self.load = load if load.mode != "serial" else replace(load, mode="closed", concurrency=1)
        self.requests = requests
        self.served = any(answers.are_wanted(prepared.body) for prepared in requests)
        self.folder = folder
        self.started_ns = 0
        self.stopped = False
        self.facts: list[dict[str, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.schedule = _schedule(self.load)
        count = self.load.processes or default_processes(self.load)
        if self.load.concurrency is not None:  # a process without a slot would keep what is due to it for ever
            count = min(count, self.load.concurrency)
        self.share = share or Share(0, max(1, count), max(1, count))
        self.count = self.share.here
        self.cpus = _cores(self.load, self.count)

    # Starting

    def open(self) -> None:
        """Start the processes and wait until their connections are open.

        Raises:
            InputError: a request cannot be sent.
            ServerError: no connection could be opened.
        """
        self._write_requests()
        tickets = self._tickets()
        try:
            for number in range(self.count):
                self._spawn(number, tickets)
        finally:
            if tickets is not None:
                os.close(tickets)
        for process in self.processes:
            first = json.loads(_out(process).readline() or b"{}")
            if not first.get("ready"):
                raise self._unconnected(first)
        self._leave_for_later()

    def _unconnected(self, told: dict[str, Any]) -> HarnessError:
        """Why a process could not open its connections: a limit of this machine is no fault of the server."""
        said = told.get("error", "the client process ended; see the lines above")
        if told.get("errno") in _OUR_LIMITS:
            return InputError(
                f"this machine does not let a process open more than {told['open']} connections: {said}",
                hint=_OUR_LIMITS[told["errno"]],
            )
        return ServerError(
            f"cannot connect to `{self.target.host}:{self.target.port}`: {said}",
            hint="is the server up, and is this its address?",
        )

    def go(self, at_ns: int | None = None) -> None:
        """Set the clock: the first requests leave at this instant of the wall clock, or at once."""
        self.started_ns = time.time_ns() + 3_000_000 if at_ns is None else at_ns
        self.offset_ns = time.time_ns() - time.monotonic_ns()
        self.tell(b"go %d\n" % self.started_ns)
        spool.write_zero(self.folder, self.started_ns)

    def _leave_for_later(self) -> None:
        """Keep what it takes to understand the spools, and nothing that went to the server: it may hold secrets."""
        spool.write_frame(self.folder, self.requests, self.load.warmup_requests, keep_text=self.load.keep_text)
        for path in self.folder.iterdir():
            if not path.name.startswith(("frame", "spool")):
                path.unlink()  # every process has it open by now

    def tell(self, line: bytes) -> None:
        """One line to every process."""
        for process in self.processes:
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()

    def _write_requests(self) -> None:
        host = f"[{self.target.host}]" if ":" in self.target.host else self.target.host
        offset, offsets = 0, [0]
        with (self.folder / "bodies").open("wb") as stream:
            for prepared in self.requests:
                headers = {**self.target.headers, **prepared.headers}
                try:
                    raw = wire.request(f"{host}:{self.target.port}", prepared.path, prepared.body, headers)
                except (wire.WireError, UnicodeEncodeError) as error:
                    raise InputError(f"request `{prepared.prompt_id}` cannot be sent: {error}") from error
                stream.write(raw)
                offset += len(raw)
                offsets.append(offset)
        first = 8 * (len(offsets) + 1)
        with (self.folder / "requests").open("wb") as stream:
            stream.write(struct.pack(f"<{len(offsets) + 1}Q", len(self.requests), *(first + at for at in offsets)))
            stream.write((self.folder / "bodies").read_bytes())
        (self.folder / "bodies").unlink()

    def _plays(self) -> list[list[int]]:
        """Which requests one slot plays one after the other: each alone, or the turns of one conversation."""
        total = len(self.requests)
        if self.load.requests is not None:
            total = self.load.requests + self.load.warmup_requests
        plays: list[list[int]] = []
        previous: tuple[int, str] | None = None
        for index in range(total):
            rounds, position = divmod(index, len(self.requests))
            conversation = self.requests[position].conversation
            this = (rounds, conversation) if conversation is not None else None
            if this is not None and this == previous:
                plays[-1].append(index)
            else:
                plays.append([index])
            previous = this
        return plays

    def _tickets(self) -> int | None:
        """The file that hands out plays across processes; None where the level ends by time alone."""
        if self.load.mode == "open" or self.load.requests is None:
            return None
        path = self.folder / "tickets"
        first, here, total = self.share.first, self.share.here, self.share.total
        mine = [number for number in range(len(self._plays())) if first <= number % total < first + here]
        path.write_bytes(struct.pack(f"<{len(mine)}Q", *mine))
        return os.open(path, os.O_RDONLY)

    def _spawn(self, number: int, tickets: int | None) -> None:
        path = self.folder / f"job{number}"
        path.write_bytes(marshal.dumps(self._job(number, tickets)))
        with interrupts_held():
            process = subprocess.Popen(
                # Nothing is imported from the working directory, which is the user's. Without `site` it starts sooner:
                # but for answers, which it reads as JSON, it needs no other package.
                [sys.executable, "-P", *([] if self.served else ["-S"]), "-m", "harness.load.reader", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=() if tickets is None else (tickets,),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [_home(), os.environ.get("PYTHONPATH")])),
                },
                start_new_session=True,  # an interrupt is for the parent, which then says stop
            )
        self.processes.append(process)

    def _job(self, number: int, tickets: int | None) -> dict[str, Any]:
        load, target, total = self.load, self.target, self.share.total
        among_all = self.share.first + number
        cap = None if load.concurrency is None else len(range(among_all, load.concurrency, total))
        family, address = _resolve(target)
        return {
            "mode": load.mode,
            "process": among_all,
            "processes": total,
            "family": family,
            "address": address,
            "tls": target.tls,
            "ca_file": target.ca_file,
            "insecure": target.insecure,
            "server_name": target.host,
            "connect_timeout_s": target.connect_timeout_s,
            "stamps": sys.platform == "linux" and not target.tls,
            "concurrency": load.concurrency if load.mode == "closed" else cap,
            "open_first": cap if load.mode == "closed" else self._expected_open(cap),
            "requests": str(self.folder / "requests"),
            "plays": self._plays() if load.mode == "closed" else [],
            "indices": len(self.requests),
            "tickets": tickets,
            "served": self.served,
            "schedule": self.schedule[among_all::total],
            "duration_s": load.duration_s if load.mode == "closed" else None,
            "ramp_up_s": load.ramp_up_s,
            "request_timeout_s": load.request_timeout_s,
            "spool": str(self.folder / f"spool{number}"),
            "cpu": self.cpus[number % len(self.cpus)] if self.cpus else None,
        }

    def _expected_open(self, cap: int | None) -> int:
        """Connections an open loop starts with: one second of arrivals; it opens more when it needs them."""
        share = math.ceil(min(self.load.rate or 1, len(self.schedule)) / self.share.total)
        return max(1, min(share, 512, cap or share))

    # Watching

    def watch(self, stop: StopSignal | None, progress: Progress | None) -> None:
        """Until every process has said its last line."""
        latest: dict[int, dict[str, int]] = {}
        buffers = dict.fromkeys(range(self.count), b"")
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self.processes):
                os.set_blocking(_out(process).fileno(), False)
                selector.register(_out(process), selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select(0.1):
                    number = int(key.data)
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    *lines, buffers[number] = (buffers[number] + data).split(b"\n")
                    for line in lines:
                        self._heard(number, json.loads(line), latest, progress)
                if stop is not None and stop.is_set() and not self.stopped:
                    self.stopped = True
                    self.tell(b"stop\n")
        if len(self.facts) < self.count:
            raise ServerError("a client process died while it measured; see the lines above")

    def _heard(
        self, number: int, said: dict[str, Any], latest: dict[int, dict[str, int]], progress: Progress | None
    ) -> None:
        if "cpu_s" in said:
            self.facts.append(said)
            return
        if "error" in said:
            raise InputError(f"cannot store what was measured in `{self.folder}`: {said['error']}")
        latest[number] = said
        if progress is not None:
            progress(**{key: sum(counts[key] for counts in latest.values()) for key in said})

    def end(self) -> None:
        """Leave no process behind, however the level ended."""
        for process in self.processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _out(process).close()

    # Understanding

    def trace(self, on_record: Callable[[RequestRecord], None] | None, count_tokens: TokenCounter | None) -> LevelTrace:
        """Read the spools and merge them, requests by index."""
        began = time.process_time()
        step = (time.time_ns() - time.monotonic_ns() - self.offset_ns) / 1e9
        records = []
        for raw in spool.raws(self.folder):
            record = transcript.understand(
                raw, self.requests[raw.index % len(self.requests)], self._frame_of(raw), count_tokens
            )
            if on_record is not None:
                on_record(record)
            records.append(record)
        records.sort(key=lambda record: (record.sent_s, record.index))
        facts = ClientFacts(
            processes=self.count,
            cpu_s=sum(fact["cpu_s"] for fact in self.facts),
            wall_s=max(fact["wall_s"] for fact in self.facts),
            kernel_stamps=all(record.kernel_stamps for record in records if record.chunks),
            reads=sum(fact["reads"] for fact in self.facts),
            parse_s=time.process_time() - began,
            wrapped=sum(record.index >= len(self.requests) for record in records),
            clock_step_s=step,
            cpus=self.cpus,
            reconnects=sum(fact["reconnects"] for fact in self.facts),
            busiest=max((fact["busiest"] for fact in self.facts if fact["busiest"] is not None), default=None),
        )
        return LevelTrace(
            tuple(records), facts, self.started_ns / 1e9, self.load.mode, self.load.concurrency, stopped=self.stopped
        )

    def _frame_of(self, raw: transcript.Raw) -> transcript.Frame:
        phase = "warmup" if raw.index < self.load.warmup_requests else "measure"
        return transcript.Frame(self.started_ns, phase, self.load.keep_text)


def _out(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _home() -> str:
    """The folder `harness` is imported from, for processes that start elsewhere."""
    return str(Path(__file__).resolve().parents[2])


def _resolve(target: Target) -> tuple[int, tuple[Any, ...]]:
    try:
        family, _, _, _, address = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerError(
            f"cannot find `{target.host}`: {error.strerror or error}", hint="is the host name right?"
        ) from error
    return int(family), tuple(address)


def _cores(load: Load, count: int) -> tuple[int, ...]:
    """Cores for the measuring processes: the last ones, where there are at least eight and four are left for each."""
    if load.cpus is not None:
        return load.cpus
    mine = sorted(os.sched_getaffinity(0))
    return tuple(mine[-count:]) if len(mine) >= max(8, 4 * count) else ()


def _schedule(load: Load) -> list[tuple[int, int]]:
    """When each request of an open loop is due: nanoseconds from the start, and its index; times do not drift."""
    if load.mode != "open" or not load.rate:
        return []
    limit = load.requests + load.warmup_requests if load.requests is not None else None
    due, schedule = 0.0, []
    for index, gap in enumerate(_gaps(load)):
        if (limit is not None and index >= limit) or (load.duration_s is not None and due >= load.duration_s):
            break
        schedule.append((round(due * 1e9), index))
        due += gap / _rate_at(load, due)
    return schedule


def _gaps(load: Load) -> Iterator[float]:
    """Gaps between arrivals in units of their mean."""
    source = random.Random(load.seed)
    while True:
        yield 1.0 if load.burstiness is None else source.gammavariate(load.burstiness, 1 / load.burstiness)


def _rate_at(load: Load, at: float) -> float:
    """The rate at a time: rises linearly from a tenth over the ramp."""
    assert load.rate is not None
    if load.ramp_up_s <= at or load.ramp_up_s == 0:
        return load.rate
    return load.rate * max(0.1, at / load.ramp_up_s)
