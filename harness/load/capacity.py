"""What this client can read here: a two-second calibration against a loopback source of like chunks."""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, MeasurementError
from harness.load.client import Load, Target, default_processes, interrupts_held, run_level
from harness.load.records import LevelTrace
from harness.load.transcript import Prepared

_SECONDS = 2.0
_FASTEST_SOURCE = 15_000  # chunks a second that the source in Python can send on one core, with room to spare
_TRIVIAL = 1_000  # chunks a second that any client reads many times over
_MANY_STREAMS = 32  # fewer would have to say more than thirty chunks a second each, to be more than trivial
_BODY = b'{"stream":true,"stream_options":{"include_usage":true}}'


@dataclass(frozen=True, slots=True)
class Capacity:
    """`chunks_s`: how many chunks a second `processes` measuring processes read at full CPU, by what one costs here.

    `rate_tried` is what one process read a second meanwhile, and `lag_p99_s` how late, None without kernel stamps.
    """

    chunks_s: float
    cpu_per_chunk_s: float
    rate_tried: float
    processes: int
    lag_p99_s: float | None


class Capacities:
    """The calibrations of one run: made before a sweep of which some level may need one, else after the level that did.

    There is one for each number of measuring processes, and it is kept.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._known: dict[int, Capacity] = {}

    def before(self, loads: Sequence[Load]) -> Iterator[str]:
        """Calibrate for the levels of a sweep while nothing else runs; a sentence on each calibration, as it begins.

        None is made for a single level, or where no level holds as many streams as could be much to read: should it
        turn out to be much all the same, the calibration follows the level (see `of`).
        """
        wanted: dict[int, int] = {}
        for load in loads if len(loads) > 1 else ():
            if (load.concurrency or 0) >= _MANY_STREAMS:
                processes = load.processes or default_processes(load)
                wanted[processes] = max(wanted.get(processes, 0), load.concurrency or 0)
        for processes, streams in sorted(wanted.items()):
            if processes not in self._known:
                yield f"calibrating the client for {self._seconds:g} s, with {streams} streams"
                with suppress(HarnessError):  # the level that needs it will say so
                    self._known[processes] = calibrate(streams, processes=processes, seconds=self._seconds)

    def of(self, trace: LevelTrace) -> tuple[float | None, str]:
        """Chunks a second that the client of a level can read here, and a sentence on how that is known.

        None where it is not known yet and not worth two seconds: hardly any load, or a level that was over sooner.
        Whether such a client was busy is seen from its CPU time all the same.
        """
        client = trace.client
        if client.hosts:
            return None, f"not calibrated: the load came from {len(client.hosts)} machines"
        if known := self._known.get(client.processes):
            return _told(known)
        rate = sum(len(record.chunks) for record in trace.records) / client.wall_s if client.wall_s else 0.0
        if rate < _TRIVIAL:
            return None, f"not calibrated: {rate:.0f} chunks/s are few for any client"
        if client.wall_s < self._seconds:
            return None, f"not calibrated: the level was over in {client.wall_s:.1f} s"
        streams = trace.concurrency or max(count for _, count in trace.in_flight())
        try:
            found = calibrate(streams, processes=client.processes, seconds=self._seconds)
        except HarnessError as error:
            return None, f"not calibrated: {error.message}"
        self._known[client.processes] = found
        return _told(found)


def _told(found: Capacity) -> tuple[float, str]:
    return found.chunks_s, f"calibrated: {found.cpu_per_chunk_s * 1e6:.1f} us a chunk at {found.rate_tried:.0f}/s"


def calibrate(
    concurrency: int, chunks_s: float = _FASTEST_SOURCE, *, processes: int = 1, seconds: float = _SECONDS
) -> Capacity:
    """Let one measuring process read a known load for about two seconds and see what a chunk costs.

    A chunk costs more CPU at a low rate, where each wakes the process, so the rate to ask about is a high one.

    Args:
        concurrency: streams of all processes, as in the level.
        chunks_s: chunks a second that one process is to read; the source sends that many, or as many as it can.
        processes: measuring processes of the level; one is tried, the others are taken to be like it.
        seconds: how long the streams last.

    Raises:
        MeasurementError: not every stream of the source came through.
    """
    streams = math.ceil(concurrency / processes)
    gap_s = max(streams / min(chunks_s, _FASTEST_SOURCE), 0.001)
    trace = _read_source(streams, gap_s, tokens=max(2, round(seconds / gap_s)))
    lost = sum(not record.ok for record in trace.records)
    if lost:
        raise MeasurementError(f"the client's calibration lost {lost} of {len(trace.records)} loopback streams")
    chunks = [chunk for record in trace.records for chunk in record.chunks]
    # By reads, not by chunks: a source that stutters sends several at once, which then cost less than they will.
    cost = trace.client.cpu_s / trace.client.reads
    lags = sorted(chunk.read_s - chunk.at_s for chunk in chunks)
    return Capacity(
        chunks_s=processes / cost,
        cpu_per_chunk_s=cost,
        rate_tried=len(chunks) / trace.client.wall_s,
        processes=processes,
        lag_p99_s=lags[len(lags) * 99 // 100] if trace.client.kernel_stamps else None,
    )


def _read_source(streams: int, gap_s: float, tokens: int) -> LevelTrace:
    load = Load(concurrency=streams, requests=streams, processes=1, keep_text=False)
    requests = [Prepared("calibration", "/v1/chat/completions", _BODY)]
    words = [sys.executable, "-m", "harness.load.source", "0"]
    settings = [f"gap_us={round(gap_s * 1e6)}", f"tokens={tokens}", "ttft_us=20000"]
    with interrupts_held():  # the source ends when the level does, and says nothing of an interrupt
        source = subprocess.Popen([*words, *settings], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    with source:
        try:
            assert source.stdout is not None
            return run_level(Target("127.0.0.1", int(source.stdout.readline())), load, requests)
        finally:
            source.terminate()
