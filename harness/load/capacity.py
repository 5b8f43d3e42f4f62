"""What this client can read here: a two-second calibration against a loopback source of the same chunks."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.errors import MeasurementError
from harness.load.client import Load, Target, default_processes, run_level
from harness.load.transcript import Prepared

_SECONDS = 2.0
_FASTEST_SOURCE = 15_000  # chunks a second that the source in Python can send on one core, with room to spare
_BODY = b'{"stream":true,"stream_options":{"include_usage":true}}'


@dataclass(frozen=True, slots=True)
class Capacity:
    """`chunks_s`: how many chunks a second the measuring processes could read at full CPU, by what one costs here.

    `lag_p99_s` is how late they were read at the rate tried, None without kernel stamps.
    """

    chunks_s: float
    cpu_per_chunk_s: float
    rate_tried: float
    processes: int
    lag_p99_s: float | None


def calibrate(
    concurrency: int, chunks_s: float, *, processes: int | None = None, seconds: float = _SECONDS
) -> Capacity:
    """Read a known load for about two seconds and see what a chunk costs.

    Args:
        concurrency: streams, as in the level to come.
        chunks_s: chunks a second expected of the server; the source sends that many, or as many as it can.
        processes: measuring processes, as in the level to come.
        seconds: how long the streams last.

    Raises:
        MeasurementError: not every stream of the source came through.
    """
    rate = min(chunks_s, _FASTEST_SOURCE)
    gap_s = max(concurrency / rate, 0.001)
    tokens = max(2, round(seconds / gap_s))
    load = Load(concurrency=concurrency, requests=concurrency, processes=processes, keep_text=False)
    requests = [Prepared("calibration", "/v1/chat/completions", _BODY)]
    words = [sys.executable, "-m", "harness.load.source", "0"]
    settings = [f"gap_us={round(gap_s * 1e6)}", f"tokens={tokens}", "ttft_us=20000"]
    with subprocess.Popen([*words, *settings], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as source:
        try:
            assert source.stdout is not None
            trace = run_level(Target("127.0.0.1", int(source.stdout.readline())), load, requests)
        finally:
            source.terminate()
    lost = sum(not record.ok for record in trace.records)
    if lost:
        raise MeasurementError(f"the client's calibration lost {lost} of {len(trace.records)} loopback streams")
    chunks = [chunk for record in trace.records for chunk in record.chunks]
    cost = trace.client.cpu_s / len(chunks)
    lags = sorted(chunk.read_s - chunk.at_s for chunk in chunks)
    return Capacity(
        chunks_s=trace.client.processes / cost,
        cpu_per_chunk_s=cost,
        rate_tried=len(chunks) / trace.client.wall_s,
        processes=processes or default_processes(load),
        lag_p99_s=lags[len(lags) * 99 // 100] if trace.client.kernel_stamps else None,
    )
