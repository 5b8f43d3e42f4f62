"""One level's load from several machines, as one client would have offered it: one schedule, one start, one trace.

The coordinator offers nothing itself. It tells each worker (`harness.load.worker`) which numbers among all measuring
processes are its own: slots, plays and arrivals are dealt out by these numbers exactly as among the processes of one
machine, so that every request is sent once, when and in the order in which one machine would have. Before and after a
level it compares clocks (`harness.load.clocks`); a worker is told the start by its own clock, and its records are put
on the coordinator's.

A request's own times (TTFT, TPOT, gaps) are differences on one machine's clock, and no error of the comparison is in
them; only what lies across machines (in-flight, the steady window) is uncertain by the bound that the record states.
"""

import contextlib
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from harness.errors import MeasurementError, ServerError
from harness.load import channel, client, clocks, transcript
from harness.load.channel import Channel, ChannelClosed
from harness.load.client import Load, Progress, Share, StopSignal, Target
from harness.load.clocks import Exchange, Offset
from harness.load.records import ClientFacts, LevelTrace, RequestRecord
from harness.load.transcript import Prepared

_EXCHANGES = 64
_LEAD_NS = 250_000_000  # from the word to start until the start: the word must have arrived everywhere
_LOOK_S = 0.1
_STREAMS_A_PROCESS = 256  # as on one machine


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine brought back of a level: its records on its own clock, and how that clock stood to ours.

    `name` is the machine's; `pretended_s` is what a test made it add to its clock.
    """

    name: str
    records: tuple[RequestRecord, ...]
    facts: ClientFacts
    before: Offset
    after: Offset
    stopped: bool = False
    pretended_s: float = 0.0


class Workers:
    """The machines that offer a run's load together. Use it as a context manager: leaving it sends them home.

    Args:
        contact: the file that tells workers where we listen, and the token they must know; gone when we are.
        count: how many machines.
        host: the address at which they reach us.
    """

    def __init__(self, contact: Path, count: int, host: str) -> None:
        self._contact = contact
        self.count = count
        self._token = secrets.token_hex(32)
        self._listener = socket.create_server((host, 0), backlog=count, family=_family(host))
        self._listener.settimeout(_LOOK_S)
        self._workers: list[_Worker] = []
        self.address = host  # also where the others find a server of ours

    def __enter__(self) -> Self:
        channel.write_contact(self._contact, self.address, int(self._listener.getsockname()[1]), self._token)
        return self

    def __exit__(self, *_: object) -> None:
        self._contact.unlink(missing_ok=True)
        self._listener.close()
        for worker in self._workers:
            with contextlib.suppress(ChannelClosed):
                worker.line.send({"bye": True})
            worker.line.close()

    def gather(self, wait_s: float, stop: StopSignal | None = None) -> list[str]:
        """Wait until every machine is there; returns their names. Strangers are turned away.

        Raises:
            ServerError: some did not come in time.
        """
        until = time.monotonic() + wait_s
        while len(self._workers) < self.count and not (stop is not None and stop.is_set()):
            if time.monotonic() >= until:
                raise ServerError(
                    f"{len(self._workers)} of {self.count} machines came within {wait_s:.0f} s to offer the load",
                    details=[f"here: {worker.name}" for worker in self._workers],
                    hint="each runs `python -m harness.load.worker` with the contact file in the run's folder",
                )
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                self._welcome(Channel(sock))
        return [worker.name for worker in self._workers]

    def _welcome(self, line: Channel) -> None:
        try:
            self._workers.append(_Worker(line, channel.welcome(line, self._token)))
        except ChannelClosed:
            line.close()

    def run_level(
        self,
        target: Target,
        load: Load,
        requests: Sequence[Prepared],
        *,
        on_record: Callable[[RequestRecord], None] | None = None,
        stop: StopSignal | None = None,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> LevelTrace:
        """As `harness.load.client.run_level`, by all machines together; `folder` stays empty: each keeps its own.

        Raises:
            InputError: the load makes no sense.
            MeasurementError: a machine could not open its connections, or was lost: the level is void.
        """
        client.check(load, requests)
        if load.drain_warmup and load.warmup_requests:
            return client.drained(
                self.run_level,
                target,
                load,
                requests,
                on_record=on_record,
                stop=stop,
                progress=progress,
                folder=folder,
            )
        shares = self._shares(load)
        workers = self._workers[: len(shares)]
        with ThreadPoolExecutor(len(workers)) as pool, _aborted(workers):
            prepared = [
                pool.submit(worker.prepare, target, load, requests, share)
                for worker, share in zip(workers, shares, strict=True)
            ]
            for each in prepared:
                each.result()
            before = [worker.compare_clocks() for worker in workers]
            start_ns = time.time_ns() + _LEAD_NS
            for worker, offset in zip(workers, before, strict=True):
                worker.go(start_ns + round(offset.offset_s * 1e9))
            brought = self._watch(pool, workers, stop, progress)
            after = [worker.compare_clocks() for worker in workers]
        parts = [
            Part(worker.name, records, facts, first, last, stopped, worker.pretended_s)
            for worker, (records, facts, stopped), first, last in zip(workers, brought, before, after, strict=True)
        ]
        trace = merged(parts, load, start_ns)
        for record in trace.records if on_record else ():
            assert on_record is not None
            on_record(record)
        return trace

    def _shares(self, load: Load) -> list[Share]:
        """Equal numbers of processes on each machine, none without a slot."""
        streams = load.concurrency or math.ceil(load.rate or 1)
        most = 1 if load.mode == "serial" else load.concurrency
        machines = min(self.count, most) if most else self.count
        cores = min(worker.cores for worker in self._workers[:machines])
        wanted = load.processes or max(1, min(math.ceil(streams / machines / _STREAMS_A_PROCESS), cores // 4))
        each = min(wanted, most // machines) if most else wanted
        return [Share(number * each, each, machines * each) for number in range(machines)]

    @staticmethod
    def _watch(
        pool: ThreadPoolExecutor, workers: Sequence["_Worker"], stop: StopSignal | None, progress: Progress | None
    ) -> list[tuple[tuple[RequestRecord, ...], ClientFacts, bool]]:
        """Until every machine has brought its records; one that is lost ends the others' part too."""
        told = _Counts(progress)
        futures = [pool.submit(worker.collect, told.of(worker)) for worker in workers]
        ended = False
        while not all(future.done() for future in futures):
            lost = any(future.done() and future.exception() is not None for future in futures)
            if not ended and (lost or (stop is not None and stop.is_set())):
                ended = True
                for worker in workers:
                    worker.stop()
            time.sleep(_LOOK_S)
        return [future.result() for future in futures]


class _Worker:
    """The coordinator's view of one machine."""

    def __init__(self, line: Channel, about: Mapping[str, Any]) -> None:
        self.line = line
        self.name = str(about["name"])
        self.cores = int(about["cores"])
        self.pretended_s = float(about["pretended_s"])

    def prepare(self, target: Target, load: Load, requests: Sequence[Prepared], share: Share) -> None:
        """Hand over a level, and wait until its connections are open."""
        with self._heard():
            level = {"target": asdict(target), "level": asdict(load), "share": asdict(share)}
            self.line.send({**level, "requests": len(requests)})
            for each in requests:
                body = each.body.decode("utf-8", "surrogateescape")
                self.line.send({**asdict(each), "headers": dict(each.headers), "body": body})
            answer = self.line.receive(target.connect_timeout_s + 60.0)
        if "error" in answer:
            raise self._failed(answer)

    def compare_clocks(self) -> Offset:
        """How far this machine's clock is from ours now."""
        exchanges = []
        with self._heard():
            for _ in range(_EXCHANGES):
                asked = time.time_ns()
                self.line.send({"ping": asked})
                answer = self.line.receive()
                exchanges.append(Exchange(asked, answer["heard"], answer["said"], time.time_ns()))
        try:
            return clocks.offset(exchanges)
        except ValueError as error:
            raise MeasurementError(f"the clocks here and on `{self.name}` cannot be compared: {error}") from error

    def go(self, at_ns: int) -> None:
        """Start at an instant of this machine's clock."""
        with self._heard():
            self.line.send({"go": at_ns})

    def stop(self) -> None:
        """End the level at once."""
        with contextlib.suppress(ChannelClosed):
            self.line.send({"stop": True})

    def abort(self) -> None:
        """Wait for no start any more."""
        with contextlib.suppress(ChannelClosed):
            self.line.send({"abort": True})

    def collect(self, progress: Progress) -> tuple[tuple[RequestRecord, ...], ClientFacts, bool]:
        """Pass counts on until the level is over, then take its records."""
        with self._heard():
            while "facts" not in (said := self.line.receive()):
                if "error" in said:
                    raise self._failed(said)
                progress(**said["progress"])
            records = tuple(RequestRecord.from_json(self.line.receive()) for _ in range(said["records"]))
        facts = ClientFacts(**{**said["facts"], "cpus": tuple(said["facts"]["cpus"]), "hosts": ()})
        return records, facts, bool(said["stopped"])

    def _failed(self, said: dict[str, Any]) -> Exception:
        error = channel.failed(said)
        error.message = f"machine `{self.name}`: {error.message}"
        return error

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as closed:
            raise MeasurementError(
                f"machine `{self.name}`, which offers part of the load, is lost: {closed}"
            ) from closed


class _Counts:
    """Progress counts of several machines as one."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._latest: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def of(self, worker: _Worker) -> Progress:
        """What takes one machine's counts."""

        def take(**counts: int) -> None:
            with self._lock:
                self._latest[worker.name] = counts
                if self._progress is not None:
                    everyone = self._latest.values()
                    self._progress(**{name: sum(each.get(name, 0) for each in everyone) for name in counts})

        return take


@contextlib.contextmanager
def _aborted(workers: Sequence[_Worker]) -> Iterator[None]:
    """Tell every machine when a level comes to nothing, so that none waits for its start."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.abort()
        raise


def merged(parts: Sequence[Part], load: Load, start_ns: int) -> LevelTrace:
    """One trace of several machines' parts, all records on one clock, in the order in which one machine has them.

    Args:
        parts: each with times from its own zero, which is the start as its clock was thought to say it.
        load: the level's load.
        start_ns: the start by the coordinator's clock.
    """
    records = [record for part in parts for record in _on_our_clock(part)]
    records.sort(key=lambda record: (record.sent_s, record.index))
    facts = [part.facts for part in parts]
    together = ClientFacts(
        processes=sum(each.processes for each in facts),
        cpu_s=sum(each.cpu_s for each in facts),
        wall_s=max(each.wall_s for each in facts),
        kernel_stamps=all(each.kernel_stamps for each in facts),
        reads=sum(each.reads for each in facts),
        parse_s=sum(each.parse_s for each in facts),
        wrapped=sum(each.wrapped for each in facts),
        clock_step_s=max((each.clock_step_s for each in facts), key=abs),
        reconnects=sum(each.reconnects for each in facts),
        busiest=max((each.busiest for each in facts if each.busiest is not None), default=None),
        hosts=tuple(_host(part) for part in parts),
    )
    stopped = any(part.stopped for part in parts)
    concurrency = 1 if load.mode == "serial" else load.concurrency
    mode = "closed" if load.mode == "serial" else load.mode
    return LevelTrace(tuple(records), together, start_ns / 1e9, mode, concurrency, stopped)


def _on_our_clock(part: Part) -> Iterator[RequestRecord]:
    """Records from a zero that was right before the level; what the clock gained since is taken off, by the send."""
    gained = clocks.drift(part.before, part.after)
    for record in part.records:
        yield transcript.shifted(record, -gained * record.sent_s) if gained else record


def _host(part: Part) -> dict[str, Any]:
    told = {
        "name": part.name,
        "processes": part.facts.processes,
        "cpus": list(part.facts.cpus),
        "cpu_s": part.facts.cpu_s,
        "requests": len(part.records),
        "clock_before": part.before.to_json(),
        "clock_after": part.after.to_json(),
        "clock_bound_s": max(part.before.bound_s, part.after.bound_s),
    }
    return {**told, "pretended_clock_s": part.pretended_s} if part.pretended_s else told


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
