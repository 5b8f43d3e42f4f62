"""Every formula of a level, once: what TTFT, TPOT, gaps and throughput mean here, from raw records. Pure.

Symbols, as in the design: `s` request bytes about to be written; `c1`, `cL` arrival of the first and last chunk that
carried generated tokens; `k_i` tokens in chunk i; `g_i` gap before chunk i; `n` output tokens as the server counted.
Only good requests of the measured phase are samples; tokens of warm-up requests that arrive inside the steady window
count for its throughput, since the server worked on them in that time.
"""

import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.load.records import LevelTrace, RequestRecord
from harness.stats.level import MEASUREMENT, LevelResult, Summary, Throughput, Verdict, Window
from harness.stats.percentiles import bounded, supports


@dataclass(frozen=True, slots=True)
class Identity:
    """Which cell of which run a level's numbers belong to."""

    cell_id: str
    arm: str
    launch: str
    block: int = 0
    simulated: bool = False


def summarise(
    trace: LevelTrace,
    identity: Identity,
    level: Mapping[str, Any],
    *,
    server: Mapping[str, Any] | None = None,
    capacity: tuple[float | None, str] | None = None,
) -> LevelResult:
    """Everything `level.json` says about one level, with a verdict still to be judged.

    Args:
        trace: what `load.client.run_level` brought back.
        identity: the cell.
        level: the level as planned: mode, concurrency, requests, `goodput` (objectives by name) ...
        server: counter deltas and what follows from them.
        capacity: chunks a second that this client can read here, and how that is known, from `load.capacity`.

    Returns:
        The result; its verdict is `valid`, or `not run` without a measured request, until `stats.validity` judges it.
    """
    measured = [record for record in trace.records if record.phase == "measure"]
    good = [record for record in measured if record.ok]
    window = steady_window(trace)
    started = datetime.datetime.fromtimestamp(trace.started_at, datetime.UTC)
    return LevelResult(
        measurement=MEASUREMENT,
        cell_id=identity.cell_id,
        arm=identity.arm,
        launch=identity.launch,
        block=identity.block,
        level=dict(level),
        started_at=started.isoformat(timespec="milliseconds"),
        simulated=identity.simulated,
        requests=len(measured),
        ok=len(good),
        failures=dict(Counter(record.reason or "unknown" for record in measured if not record.ok)),
        output_tokens=sum(record.output_tokens or 0 for record in good),
        prompt_tokens=_total(record.prompt_tokens for record in good),
        cached_tokens=_total(record.cached_tokens for record in good),
        counter=_counter(good),
        window=window,
        throughput=_throughput(trace, window, level.get("goodput") or {}),
        metrics=request_metrics(measured),
        client=client_facts(trace, window, capacity),
        server=dict(server or {}),
        verdict=Verdict(state="valid" if measured else "not run"),
    )


# One request


def ttft(record: RequestRecord) -> float | None:
    """Time to first token, `c1 - s`: from a request's first byte on an open connection to its first token's chunk."""
    return record.chunks[0].at_s - record.sent_s if record.chunks else None


def e2e(record: RequestRecord) -> float | None:
    """End to end, `cL - s`: usage chunks and `[DONE]` come after it."""
    return record.chunks[-1].at_s - record.sent_s if record.chunks else None


def tpot(record: RequestRecord) -> float | None:
    """Time per output token, `(cL - c1) / (n - k_1)`; None when n <= k_1, or when nobody counted.

    A first chunk of several tokens took no decode time for them, so they leave the denominator (mlcommons/endpoints
    does the same). Where the server does not say k_1 it is taken to be 1.
    """
    if not record.chunks or record.output_tokens is None:
        return None
    first = record.chunks[0].tokens
    after = record.output_tokens - (1 if first is None else first)
    return (record.chunks[-1].at_s - record.chunks[0].at_s) / after if after > 0 else None


def tpot_naive(record: RequestRecord) -> float | None:
    """`(E2E - TTFT) / (n - 1)`: what vLLM and SGLang print as TPOT, kept for comparison; None when n < 2."""
    if not record.chunks or record.output_tokens is None or record.output_tokens < 2:
        return None
    return (record.chunks[-1].at_s - record.chunks[0].at_s) / (record.output_tokens - 1)


def chunk_gaps(record: RequestRecord) -> list[float]:
    """`g_i` for i >= 2: what a reader sees stall."""
    return [after.at_s - before.at_s for before, after in itertools.pairwise(record.chunks)]


def token_gaps(record: RequestRecord) -> list[float]:
    """Token ITL: `g_i / k_i`, k_i times, for i >= 2; empty where the server does not say k_i.

    The gap of a chunk that carried text but no new token is part of the next token's.
    """
    gaps: list[float] = []
    waited = 0.0
    for gap, chunk in zip(chunk_gaps(record), record.chunks[1:], strict=True):
        if chunk.tokens is None:
            return []
        waited += gap
        if chunk.tokens:
            gaps += [waited / chunk.tokens] * chunk.tokens
            waited = 0.0
    return gaps


def send_skew(record: RequestRecord) -> float | None:
    """How late an open loop's request left, `s - due`, apart from what it waited for a cap; None in a closed loop."""
    if record.scheduled_s is None:
        return None
    return record.sent_s - record.scheduled_s - (record.queued_s or 0.0)


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a good request keeps every objective: seconds by `ttft_s`, `tpot_s`, `e2e_s` (goodput's unit)."""
    measured: dict[str, Callable[[RequestRecord], float | None]] = {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": e2e}
    values = ((measured[name](record), limit) for name, limit in objectives.items())
    return record.ok and all(value is None or value <= limit for value, limit in values)


def goodput(trace: LevelTrace, objectives: Mapping[str, float]) -> float | None:
    """Requests a second that keep every objective, over the whole run; None without a good request."""
    measured = [record for record in trace.records if record.phase == "measure"]
    span = _span(measured)
    return sum(meets(record, objectives) for record in measured) / span if span else None


def _throughput(trace: LevelTrace, window: Window, objectives: Mapping[str, float]) -> Throughput:
    rates = throughput(trace.records, window)
    return rates.model_copy(update={"goodput_requests_s": goodput(trace, objectives)}) if objectives else rates


# A level


def request_metrics(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """The distributions over a level's measured requests, in seconds; only metrics that have a sample."""
    good = [record for record in records if record.ok]
    samples: dict[str, list[float]] = {
        "ttft_s": _known(ttft(record) for record in good),
        "tpot_s": _known(tpot(record) for record in good),
        "tpot_naive_s": _known(tpot_naive(record) for record in good),
        "chunk_gap_s": [gap for record in good for gap in chunk_gaps(record)],
        "token_itl_s": [gap for record in good for gap in token_gaps(record)],
        "e2e_s": _known(e2e(record) for record in good),
        "queued_s": _known(record.queued_s for record in good),
        "connect_s": _known(record.connect_s for record in records),
        "send_skew_s": _known(send_skew(record) for record in records),
    }
    return {name: summary(values) for name, values in samples.items() if values}


def summary(values: Sequence[float]) -> Summary:
    """Mean, spread and percentiles (linear interpolation); a percentile that the sample cannot support is None."""
    if not len(values):
        return Summary(n=0)
    array = np.asarray(values, dtype=float)

    shown = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    found = {name: bounded(array, share) for name, share in shown.items() if supports(len(array), share)}
    return Summary(
        n=len(array),
        mean=float(array.mean()),
        std=float(array.std(ddof=1)) if len(array) > 1 else None,
        minimum=float(array.min()),
        maximum=float(array.max()),
        **{name: percentile.value for name, percentile in found.items()},
        bounds={name: (percentile.low, percentile.high) for name, percentile in found.items()},
    )


def steady_window(trace: LevelTrace) -> Window:
    """From when in-flight first reaches the level, warm-up being over, until the first slot stays empty for good.

    An open loop has no level to reach: its window is the time in which measured requests were sent.
    """
    measured = [record.sent_s for record in trace.records if record.phase == "measure"]
    if not measured:
        return Window(start_s=None, end_s=None)
    if trace.mode == "open":
        return _window(min(measured), max(measured))
    level = 1 if trace.mode == "serial" else trace.concurrency or 1
    reached = next((at for at, count in trace.in_flight() if count >= level), None)
    if reached is None:
        return Window(start_s=None, end_s=None)
    last: dict[int, float] = {}
    for record in trace.records:
        last[record.slot] = max(last.get(record.slot, record.end_s), record.end_s)
    return _window(max(reached, min(measured)), min(last.values()))


def throughput(records: Sequence[RequestRecord], window: Window) -> Throughput:
    """Output rate in the steady window (by chunk arrivals), and rates over the whole run of measured requests."""
    good = [record for record in records if record.ok and record.phase == "measure"]
    span = _span(record for record in records if record.phase == "measure")
    counted = good and all(record.output_tokens is not None for record in good)
    output = sum(record.output_tokens or 0 for record in good)
    prompt = _total(record.prompt_tokens for record in good)
    rates = [(record.output_tokens, e2e(record)) for record in good]
    each = [tokens / seconds for tokens, seconds in rates if tokens is not None and seconds]
    return Throughput(
        output_tok_s=window_tokens(records, window),
        output_tok_s_whole=output / span if counted and span else None,
        total_tok_s_whole=(output + prompt) / span if counted and span and prompt is not None else None,
        requests_s_whole=len(good) / span if good and span else None,
        per_request_tok_s=float(np.mean(each)) if each else None,
    )


def window_tokens(records: Iterable[RequestRecord], window: Window) -> float | None:
    """Tokens a second that arrived inside the window, of good requests of either phase.

    Where a server does not say how many tokens each chunk carried, a request's tokens are spread evenly over its
    chunks. None without a window, or when some good request was not counted.
    """
    if window.start_s is None or window.end_s is None:
        return None
    arrived = 0.0
    for record in records:
        if not record.ok:
            continue
        if record.output_tokens is None:
            return None
        even = record.output_tokens / len(record.chunks)
        for chunk in record.chunks:
            if window.start_s < chunk.at_s <= window.end_s:
                arrived += even if chunk.tokens is None else chunk.tokens
    return arrived / (window.end_s - window.start_s)


def mean_in_flight(steps: Sequence[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Time-weighted mean of a step function between two times."""
    area, last, count = 0.0, start_s, 0
    for at, now in steps:
        if at > end_s:
            break
        if at > last:
            area += count * (at - last)
            last = at
        count = now
    return (area + count * (end_s - last)) / (end_s - start_s)


def client_facts(trace: LevelTrace, window: Window, capacity: tuple[float | None, str] | None = None) -> dict[str, Any]:
    """What the client says of itself: lag, CPU, merged reads, in-flight, its own capacity.

    Lag is from the kernel's stamp to the read; without kernel stamps it is the most it can have been: from when a
    chunk may have arrived at the earliest to the read. Send skew and queueing are among the metrics.
    """
    client, steps = trace.client, trace.in_flight()
    chunks = [chunk for record in trace.records for chunk in record.chunks]
    known = client.kernel_stamps
    lags = [chunk.read_s - (chunk.at_s if known or chunk.since_s is None else chunk.since_s) for chunk in chunks]
    lag = np.asarray(lags) if lags else None
    rate = len(chunks) / client.wall_s if client.wall_s else None
    bounds = (window.start_s, window.end_s)
    can, how = capacity or (None, None)
    return {
        "processes": client.processes,
        "cpus": list(client.cpus),
        "cpu_s": client.cpu_s,
        "cpu_share": client.cpu_s / (client.wall_s * client.processes) if client.wall_s else None,
        "cpu_share_most": client.busiest,
        "parse_s": client.parse_s,
        "kernel_stamps": client.kernel_stamps,
        "lag_p50_s": float(np.quantile(lag, 0.50)) if lag is not None else None,
        "lag_p99_s": float(np.quantile(lag, 0.99)) if lag is not None else None,
        "merged_share": sum(chunk.merged for chunk in chunks) / len(chunks) if chunks else None,
        "reads": client.reads,
        "chunks_s": rate,
        "capacity_chunks_s": can,
        "capacity_share": rate / can if rate and can else None,
        "capacity_note": how,
        "peak_in_flight": max((count for _, count in steps), default=0),
        "mean_in_flight": mean_in_flight(steps, *bounds) if None not in bounds else None,  # type: ignore[arg-type]
        "wrapped_requests": client.wrapped,
        "clock_step_s": client.clock_step_s,
        "reconnects": client.reconnects,
        "stopped": trace.stopped,
        **({"hosts": list(client.hosts)} if client.hosts else {}),
    }


def _window(start: float, end: float) -> Window:
    return Window(start_s=start, end_s=end) if end > start else Window(start_s=None, end_s=None)


def _span(records: Iterable[RequestRecord]) -> float | None:
    """First send to the last byte of a token chunk; None where nothing arrived."""
    listed = list(records)
    ends = [record.chunks[-1].at_s for record in listed if record.ok and record.chunks]
    span = max(ends) - min(record.sent_s for record in listed) if ends else 0.0
    return span if span > 0 else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Iterable[int | None]) -> int | None:
    """The sum, None when any is not known."""
    listed = list(values)
    return sum(value for value in listed if value is not None) if listed and None not in listed else None


def _counter(records: Sequence[RequestRecord]) -> str | None:
    """Who counted the output tokens; several names when requests differ."""
    names = sorted({record.counter or "nobody" for record in records})
    return ", ".join(names) if names else None
