"""Whether a level's numbers count: a pure judgement over the level's result and what was seen around it.

A finding is `invalid` when the level did not measure what the plan says (nothing came back, the server died, in-flight
never reached the level), and `suspect` when it did but something may have bent the number. The list is the design's;
each rule's threshold is a field of `Limits`, so that a record can say what it was judged by.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from harness.engines.engine import Evidence
from harness.load.records import RequestRecord
from harness.stats.intervals import p_value, unpaired
from harness.stats.level import LevelResult, Reason, Verdict
from harness.stats.metrics import ttft
from harness.stats.saturation import overload

TEMPLATE_SHARE = 0.75  # a template is less of a prompt than this; more is a prompt that was asked before
WAVES = 6  # how many times a wait must fit into a stretch of time before that stretch's throughput means anything


@dataclass(frozen=True, slots=True)
class Limits:
    """Where findings start.

    Attributes:
        failed_share: share of failed requests above which a level is invalid; any failure at all makes it suspect.
        cached_share: share of prompt tokens served from cache above which a level planned cold is invalid.
        alike_share: the same beyond a known template, of which prompts that begin with the same words explain as much.
        counts_apart: relative distance between two counts of the same tokens.
        in_flight_share: share of the steady window's slots that must have been busy on average.
        stalled_below: share of the median slice's throughput below which a slice stood still.
        drift: relative change of throughput from the first to the second half of the steady window.
        lag_share: client lag (p99) as a share of a median request; a closed loop's next request leaves that much late.
        lag_unstamped_s: client lag (p99) where arrivals carry no kernel stamp, so that it bends them.
        skew_s: how late requests of an open loop may leave (p99).
        capacity_share: share of what the client can read here, by its calibration; without one, of its CPU time.
        merged_share: share of chunks whose arrival is known only as an interval.
        clock_step_s: how far the wall clock, whose stamps arrivals carry, may be set.
        clock_bound_s: how far apart the clocks of machines that offer a load together may be without our knowing.
    """

    failed_share: float = 0.05
    alike_share: float = 0.01
    cached_share: float = 0.10
    counts_apart: float = 0.02
    in_flight_share: float = 0.90
    stalled_below: float = 0.25
    drift: float = 0.05
    lag_share: float = 0.10
    lag_unstamped_s: float = 0.001
    skew_s: float = 0.050
    capacity_share: float = 0.70
    merged_share: float = 0.01
    clock_step_s: float = 0.001
    clock_bound_s: float = 0.010


class Rate(NamedTuple):
    """Output tok/s as somebody says, as the client measured over the same time, and how far apart they may be beyond
    `Limits.counts_apart` (a share), for what falls on either side of that time's ends."""

    said: float
    measured: float
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """What was planned for a level and seen around it. Everything is optional: not known is not judged.

    Attributes:
        cold: the plan says that no prompt token may come from a cache.
        fixed_tokens: every request was to yield exactly this many tokens (`ignore_eos`).
        server_died: how the server ended, where it did.
        server_restarted: it is not the process that the launch started.
        evidence: one answer for each feature that the recipe expects.
        throttled: the GPU's reasons for slowing down during the level.
        shared_with: other processes that used the level's GPUs.
        slices: output tok/s in equal slices of the steady window, in order.
        counts: other counts of all the level's output tokens, warm-up included, by who counted (`the server's log`).
        rates: other figures for output tok/s, by source, each with the client's own over the same time.
        template_tokens: how many tokens every prompt begins with, which no plan can keep out of a prefix cache.
        records: the level's requests, for findings that name how many.
        limits: where findings start.
    """

    cold: bool = False
    fixed_tokens: int | None = None
    server_died: str | None = None
    server_restarted: bool = False
    evidence: Sequence[Evidence] = ()
    throttled: Sequence[str] = ()
    shared_with: Sequence[str] = ()
    slices: Sequence[float] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=dict)
    template_tokens: int = 0
    records: Sequence[RequestRecord] = ()
    limits: Limits = field(default_factory=Limits)


class Finding(NamedTuple):
    """One reason, and how bad it is."""

    state: Literal["suspect", "invalid"]
    code: str
    message: str


def judge(result: LevelResult, context: Context) -> Verdict:
    """The verdict on one level; the one that `result` carries is ignored.

    Returns:
        `not run` without requests, `invalid` if any finding is, else `suspect` if there is any, else `valid`.
        Invalid reasons stand first.
    """
    if result.requests == 0:
        return Verdict(state="not run", reasons=(Reason(code="not-run", message="no request was sent"),))
    findings = sorted(
        (finding for rule in RULES for finding in rule(result, context)), key=lambda finding: finding.state
    )
    reasons = tuple(Reason(code=finding.code, message=finding.message) for finding in findings)
    if not reasons:
        return Verdict(state="valid")
    return Verdict(state=findings[0].state, reasons=reasons)


def judged(result: LevelResult, context: Context) -> LevelResult:
    """The result with its verdict put in."""
    return result.model_copy(update={"verdict": judge(result, context)})


def _server(result: LevelResult, context: Context) -> Iterator[Finding]:
    if context.server_died is not None:
        yield Finding("invalid", "server-died", f"the server died during the level: {context.server_died}")
    if context.server_restarted:
        yield Finding("invalid", "server-restarted", "the server is not the process that the launch started")


def _failed(result: LevelResult, context: Context) -> Iterator[Finding]:
    failed = result.requests - result.ok
    if not failed:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.failures.items(), key=lambda kv: -kv[1]))
    message = f"{failed} of {result.requests} requests failed" + (f": {kinds}" if kinds else "")
    invalid = result.ok == 0 or failed / result.requests > context.limits.failed_share
    yield Finding("invalid" if invalid else "suspect", "failed-requests", message)


def _tokens(result: LevelResult, context: Context) -> Iterator[Finding]:
    if result.ok and result.output_tokens == 0:
        yield Finding("invalid", "no-tokens", f"{result.ok} requests ended well and yielded 0 tokens")
    good = [record for record in context.records if record.ok and record.phase == "measure"]
    empty = sum(record.output_tokens == 0 for record in good)
    if empty and result.output_tokens:
        yield Finding("suspect", "no-tokens", f"{empty} of {len(good)} good requests yielded 0 tokens")
    if context.fixed_tokens is not None:
        yield from _lengths(result, good, context.fixed_tokens)


def _lengths(result: LevelResult, good: Sequence[RequestRecord], wanted: int) -> Iterator[Finding]:
    lengths = Counter(
        record.output_tokens for record in good if record.output_tokens is not None and record.output_tokens != wanted
    )
    if lengths:
        seen = ", ".join(f"{count} x {length}" for length, count in lengths.most_common(3))
        message = f"{lengths.total()} of {len(good)} requests yielded another length than {wanted}: {seen}"
        yield Finding("suspect", "wrong-length", message)
    elif not good and result.ok and result.output_tokens != result.ok * wanted:
        mean = result.output_tokens / result.ok
        yield Finding("suspect", "wrong-length", f"{mean:.1f} tokens a request on average where {wanted} were asked")
    early = sum(record.finish_reason not in {None, "length"} for record in good)
    if early:
        message = f"{early} of {len(good)} requests stopped by themselves where {wanted} tokens were asked"
        yield Finding("suspect", "early-stop", message)


def _cache(result: LevelResult, context: Context) -> Iterator[Finding]:
    """Cached prompt tokens beyond those of the chat template, which every prompt begins with."""
    if not context.cold or not result.cached_tokens:
        return
    template = context.template_tokens
    good = [record for record in context.records if record.ok and record.phase == "measure"]
    each = [record.cached_tokens for record in good if record.cached_tokens is not None]
    cached = sum(max(0, tokens - template) for tokens in each) if template and each else result.cached_tokens
    share = cached / result.prompt_tokens if result.prompt_tokens else None
    if template and each and share is not None and share <= context.limits.alike_share:
        return
    of = f" of {result.prompt_tokens} ({share:.1%})" if share is not None else ""
    invalid = share is None or share > context.limits.cached_share
    message = f"{cached}{of} prompt tokens came from the cache where a cold one was planned"
    beyond = f", beyond the {template} of the template that every prompt begins with" if template and each else ""
    yield Finding("invalid" if invalid else "suspect", "cached-prompt", message + beyond)


def template_tokens(warm_up: Sequence[RequestRecord]) -> int:
    """How many tokens every prompt begins with: what the first request of a launch's serial warm-up found cached.

    Nothing went before it but the readiness probe, which shares nothing with a prompt but the template. A request that
    found most of its prompt says nothing: that prompt was asked before. A server that caches whole pages counts those.
    """
    first = min(warm_up, key=lambda record: record.sent_s, default=None)
    if first is None or not first.ok or not first.cached_tokens or not first.prompt_tokens:
        return 0
    return first.cached_tokens if first.cached_tokens <= TEMPLATE_SHARE * first.prompt_tokens else 0


def _in_flight(result: LevelResult, context: Context) -> Iterator[Finding]:
    wanted = result.level.get("concurrency")
    if result.level.get("mode") != "closed" or not isinstance(wanted, int) or result.ok == 0:
        return
    peak, mean = _number(result.client, "peak_in_flight"), _number(result.client, "mean_in_flight")
    if result.window.start_s is None or (peak is not None and peak < wanted):
        seen = f"at most {peak:g}" if peak is not None else "fewer"
        yield Finding("invalid", "in-flight", f"in-flight never reached {wanted}: {seen} requests at once")
    elif mean is not None and mean < context.limits.in_flight_share * wanted:
        message = f"{mean:.1f} requests in flight on average in the steady window where {wanted} were planned"
        yield Finding("suspect", "in-flight", message)


def _steady(result: LevelResult, context: Context) -> Iterator[Finding]:
    """Drift within the level, where it lasts long enough to tell drift from the waves that requests come in."""
    start, end, answer = result.window.start_s, result.window.end_s, _typical(result, "e2e_s")
    if answer is not None and start is not None and end is not None and end - start < WAVES * answer:
        return
    drift = trend(context.slices)
    if drift is not None and abs(drift.change) > context.limits.drift and drift.certain:
        message = f"throughput {'rose' if drift.change > 0 else 'fell'} by {abs(drift.change):.1%} within the level"
        yield Finding("suspect", "not-steady", f"{message}: the warm-up was too short, or the server slows down")


def _stalled(result: LevelResult, context: Context) -> Iterator[Finding]:
    """Slices in which hardly anything arrived, where a slice is long enough to see a first token and several chunks."""
    slices, (start, end) = context.slices, (result.window.start_s, result.window.end_s)
    waits = [wait for name in ("ttft_s", "chunk_gap_s") if (wait := _typical(result, name)) is not None]
    if not slices or not waits or start is None or end is None or result.level.get("mode") == "open":
        return  # an open loop has idle times of its own
    if (end - start) / len(slices) < WAVES * max(waits):
        return
    usual = float(np.median(slices))
    still = sum(value < context.limits.stalled_below * usual for value in slices)
    if still:
        message = f"hardly anything arrived in {still} of {len(slices)} slices of the level: something stood still"
        yield Finding("suspect", "stalled", message)


def _overload(result: LevelResult, context: Context) -> Iterator[Finding]:
    """An open loop that the server cannot keep up with: its latencies tell how long the level was, and little else."""
    sent = [record for record in context.records if record.phase == "measure"]
    if result.level.get("mode") != "open" or not sent:
        return
    full = min(record.end_s for record in context.records)  # until then in-flight grows on any server
    later = [record for record in sent if record.sent_s >= full]
    if not later and len(sent) > 1:
        last = max(record.sent_s for record in sent)
        message = (
            f"the last request left {last:.3g} s in, the first one ended {full:.3g} s in: the server only filled up"
        )
        yield Finding("suspect", "only-filled", message)
    span = max((record.sent_s for record in later), default=full) - full
    if span <= 0:
        return
    waits = [(record.sent_s, wait) for record in later if record.ok and (wait := ttft(record)) is not None]
    rate = len(later) / span
    found = overload(_in_flight_at(context.records, later), waits, confidence=0.99, rate=rate)
    if found.overloaded:
        message = f"at {rate:.3g} requests a second {found.message}: latencies depend on how long the level lasts"
        yield Finding("suspect", "overloaded", message)


def _in_flight_at(records: Sequence[RequestRecord], sent: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    """How many requests were under way whenever one was sent."""
    begun = np.sort([record.sent_s for record in records])
    ended = np.sort([record.end_s for record in records])
    times = [record.sent_s for record in sent]
    counts = np.searchsorted(begun, times, side="right") - np.searchsorted(ended, times, side="right")
    return [(at, float(count)) for at, count in zip(times, counts, strict=True)]


def _features(result: LevelResult, context: Context) -> Iterator[Finding]:
    for evidence in context.evidence:
        if evidence.engaged:
            continue
        seen = "shows that it did not" if evidence.engaged is False else "does not show that it did"
        proof = f": {evidence.lines[0]}" if evidence.lines else ""
        message = f"`{evidence.feature}` was promised to engage and the server {seen}{proof}"
        yield Finding("suspect", "feature-not-engaged", message)


def _machine(result: LevelResult, context: Context) -> Iterator[Finding]:
    if context.throttled:
        yield Finding("suspect", "gpu-throttled", f"the GPU slowed down: {', '.join(context.throttled)}")
    if context.shared_with:
        yield Finding("suspect", "gpu-shared", f"the GPU was shared with {', '.join(context.shared_with)}")


def _client(result: LevelResult, context: Context) -> Iterator[Finding]:
    yield from _lag(result, context.limits)
    yield from _busy(result, context.limits)
    skew = result.metrics.get("send_skew_s")
    late = (skew.p99 if skew.p99 is not None else skew.maximum) if skew else None
    if late is not None and late > context.limits.skew_s:
        yield Finding("suspect", "client-bound", f"requests left {late * 1e3:.0f} ms late, so the schedule was missed")
    merged = _number(result.client, "merged_share")
    if merged is not None and merged > context.limits.merged_share:
        message = f"{merged:.1%} of the chunks shared a read, so their arrival is known only as an interval"
        yield Finding("suspect", "merged-reads", message)
    step = abs(_number(result.client, "clock_step_s") or 0.0)
    if step > context.limits.clock_step_s:
        message = f"the wall clock, whose stamps arrivals carry, was set by {step * 1e3:.1f} ms during the level"
        yield Finding("suspect", "clock-step", message)
    bound = max((host["clock_bound_s"] for host in result.client.get("hosts", ())), default=0.0)
    if bound > context.limits.clock_bound_s:
        message = f"the clocks of the machines that offer the load are compared to within {bound * 1e3:.1f} ms only"
        yield Finding("suspect", "clocks-apart", message)


def _lag(result: LevelResult, limits: Limits) -> Iterator[Finding]:
    """Late reads: they bend arrivals that have no kernel stamp, and delay a closed loop's next request."""
    lag, answer = _number(result.client, "lag_p99_s"), _typical(result, "e2e_s")
    if not lag:
        return
    if result.client.get("kernel_stamps") is False and lag > limits.lag_unstamped_s:
        message = f"arrivals have no kernel stamp and were read up to {lag * 1e3:.1f} ms late (p99)"
        yield Finding("suspect", "client-bound", message)
    elif result.level.get("mode") != "open" and answer and lag > limits.lag_share * answer:
        message = (
            f"the client read {lag * 1e3:.1f} ms late (p99), {lag / answer:.0%} of a request: slots wait that long"
        )
        yield Finding("suspect", "client-bound", message)


def _busy(result: LevelResult, limits: Limits) -> Iterator[Finding]:
    """A client near what it can do: by its calibration, or by its CPU time, which says the same less exactly."""
    share, busy = _number(result.client, "capacity_share"), _number(result.client, "cpu_share")
    if share is not None and share > limits.capacity_share:
        rate = _number(result.client, "chunks_s") or 0.0
        message = f"the client read {rate:.0f} chunks/s, {share:.0%} of what it can here"
        yield Finding("suspect", "client-bound", message)
    elif busy is not None and busy > limits.capacity_share:
        yield Finding("suspect", "client-bound", f"the client's processes were busy {busy:.0%} of the time")


def _counts(result: LevelResult, context: Context) -> Iterator[Finding]:
    """Others' counts and rates of the same tokens; counts only where every request, warm-up included, ended well."""
    limit = context.limits.counts_apart
    known = [record.output_tokens for record in context.records if record.ok and record.output_tokens is not None]
    counted = _number(result.server, "generated_tokens")
    counts = {**({} if counted is None else {"the server's metrics": counted}), **context.counts}
    for source, count in counts.items() if known and len(known) == len(context.records) else ():
        if apart(count, sum(known)) > limit:
            message = f"{count:.0f} output tokens by {source}, {sum(known)} by the requests"
            yield Finding("suspect", "counts-disagree", f"{message}: {apart(count, sum(known)):.1%} apart")
    for source, rate in context.rates.items():
        if apart(rate.said, rate.measured) > limit + rate.slack:
            message = f"{rate.said:.1f} tok/s by {source}, {rate.measured:.1f} by the client in the same time"
            yield Finding("suspect", "counts-disagree", f"{message}: {apart(rate.said, rate.measured):.1%} apart")


RULES: tuple[Callable[[LevelResult, Context], Iterator[Finding]], ...] = (
    _server,
    _failed,
    _tokens,
    _cache,
    _in_flight,
    _steady,
    _stalled,
    _overload,
    _features,
    _machine,
    _client,
    _counts,
)


class Trend(NamedTuple):
    """Relative change from the first to the second half of a series, and whether it stands out of the noise."""

    change: float
    certain: bool


def trend(slices: Sequence[float]) -> Trend | None:
    """Whether a level drifts: mean of the later half of its slices against the earlier half.

    `certain` is Welch's t-test (Biometrika 34, 1947) at 1 %. None for fewer than six slices, or a zero mean.
    """
    if len(slices) < 6:
        return None
    first, second = np.array_split(np.asarray(slices, dtype=float), 2)
    if first.mean() == 0:
        return None
    change = float(second.mean() / first.mean() - 1)
    p = p_value(unpaired(first, second))
    return Trend(change, certain=p is not None and p < 0.01)


def apart(one: float, other: float) -> float:
    """Distance of two counts relative to the larger; 0 where both are 0."""
    larger = max(abs(one), abs(other))
    return abs(one - other) / larger if larger else 0.0


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _typical(result: LevelResult, metric: str) -> float | None:
    """The median, or the mean of a sample too small to show one."""
    summary = result.metrics.get(metric)
    return None if summary is None else summary.mean if summary.p50 is None else summary.p50
