"""Levels as OpenMetrics text: a summary a latency, gauges for rates, one info line with the provenance.

Every sample carries the level's start as its timestamp, so that the text can be back-filled into a database of time
series.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest

from harness.publish.interop.measured import Measured
from harness.stats.level import Summary

_LABELS = ("run", "launch", "arm", "level", "simulated")
_QUANTILES = {"0.5": "p50", "0.9": "p90", "0.99": "p99"}
_RATES = {
    "harness_output_tokens_per_second": ("output_tok_s", "Output tokens a second over the steady window"),
    "harness_output_tokens_per_second_whole": ("output_tok_s_whole", "Output tokens a second over the whole run"),
    "harness_requests_per_second_whole": ("requests_s_whole", "Good requests a second over the whole run"),
    "harness_request_tokens_per_second": ("per_request_tok_s", "Mean over requests of output tokens / E2E"),
    "harness_goodput_requests_per_second": ("goodput_requests_s", "Requests a second that keep every objective"),
}


def text(levels: Sequence[Measured]) -> str:
    """The levels as one exposition, `# EOF` included."""
    registry = CollectorRegistry()
    registry.register(_Levels(levels))
    return str(generate_latest(registry).decode())  # type: ignore[no-untyped-call]


class _Levels:
    """What `prometheus_client` asks for its metrics."""

    def __init__(self, levels: Sequence[Measured]) -> None:
        self.levels = levels

    def collect(self) -> Iterator[Metric]:
        yield from (_info(self.levels), _requests(self.levels))
        for name, (field, described) in _RATES.items():
            yield _gauge(name, described, [(one, getattr(one.result.throughput, field)) for one in self.levels])
        names = dict.fromkeys(name for one in self.levels for name in one.result.metrics)
        for name in names:
            yield _summary(name, self.levels)


def _labels(one: Measured) -> dict[str, str]:
    values = (one.run_id, one.launch, one.result.arm, one.name, str(one.result.simulated).lower())
    return dict(zip(_LABELS, values, strict=True))


def _info(levels: Sequence[Measured]) -> Metric:
    family = InfoMetricFamily("harness_level", "Where a level's numbers come from, and whether they count")
    for one in levels:
        facts = {
            "cell_id": one.result.cell_id,
            "env_id": one.arm.env_id or "",
            "engine": one.arm.engine,
            "measurement": one.result.measurement,
            "verdict": one.result.verdict.state,
        }
        family.add_sample("harness_level_info", {**_labels(one), **facts}, 1.0, timestamp=one.date.timestamp())
    return family


def _requests(levels: Sequence[Measured]) -> Metric:
    family = GaugeMetricFamily("harness_requests", "Measured requests by outcome")
    for one in levels:
        outcomes = {"ok": one.result.ok, **one.result.failures}
        for outcome, count in outcomes.items():
            labels = {**_labels(one), "outcome": outcome}
            family.add_sample("harness_requests", labels, float(count), timestamp=one.date.timestamp())
    return family


def _gauge(name: str, described: str, values: Sequence[tuple[Measured, float | None]]) -> Metric:
    family = GaugeMetricFamily(name, described)
    for one, value in values:
        if value is not None:
            family.add_sample(name, _labels(one), value, timestamp=one.date.timestamp())
    return family


def _summary(name: str, levels: Sequence[Measured]) -> Metric:
    exposed = f"harness_{name.removesuffix('_s')}_seconds"
    family = Metric(exposed, f"`{name}` of docs/metrics.md, over a level's good requests", "summary")
    for one in levels:
        if (summary := one.result.metrics.get(name)) is not None and summary.mean is not None:
            for suffix, extra, value in _samples(summary, summary.mean):
                labels = {**_labels(one), **extra}
                family.add_sample(exposed + suffix, labels, value, timestamp=one.date.timestamp())
    return family


def _samples(summary: Summary, mean: float) -> Iterator[tuple[str, dict[str, str], float]]:
    """A summary's samples; a quantile that the sample cannot support is left out."""
    found: dict[str, Any] = {quantile: getattr(summary, field) for quantile, field in _QUANTILES.items()}
    yield from (("", {"quantile": quantile}, value) for quantile, value in found.items() if value is not None)
    yield "_count", {}, float(summary.n)
    yield "_sum", {}, mean * summary.n
