"""guidellm's JSON report, read. After what guidellm 0.8 writes; each of its benchmarks is a level."""

from typing import Any

from harness.errors import InputError
from harness.publish.interop.told import MILLISECONDS, Told, seconds, text

_DIFFERENCES = (
    "ITL is (cL - c1) / (n - 1) of each request, once a token: `tpot_naive_s`, with percentiles over tokens",
    "its TPOT is E2E / n and holds the TTFT: left out, as nothing here is so defined",
    "times are of the wall clock and of the client's reads, so its own lateness is in TTFT and in E2E",
    "E2E ends with the request, which may be after the last token",
    "throughput is over the whole run but for the warm-up and cool-down it was told: `output_tok_s_whole`",
    "percentiles are the nearest rank, and given for any number of requests",
)


def read(data: dict[str, Any]) -> list[Told]:
    """The report's benchmarks as levels of a reference.

    Raises:
        InputError: it is not such a report, or a benchmark is of a kind that is no level.
    """
    version = (data.get("metadata") or {}).get("guidellm_version")
    benchmarks = data.get("benchmarks")
    if version is None or not isinstance(benchmarks, list) or not benchmarks:
        raise InputError("no `metadata.guidellm_version` and `benchmarks`: not a report of guidellm")
    backend = ((data.get("config") or {}).get("spec") or {}).get("backend") or {}
    return [_level(one, f"guidellm {version}", backend.get("model")) for one in benchmarks]


def _level(benchmark: dict[str, Any], tool: str, model: Any) -> Told:
    metrics = benchmark.get("metrics") or {}
    totals = metrics.get("request_totals") or {}
    level = {
        **_offered((benchmark.get("config") or {}).get("strategy") or {}),
        "output_tok_s": _good(metrics, "output_tokens_per_second").get("mean"),
        "requests": totals.get("total"),
        "ok": totals.get("successful"),
        **seconds("ttft", _good(metrics, "time_to_first_token_ms"), 1 / MILLISECONDS),
        **seconds("tpot_naive", _good(metrics, "inter_token_latency_ms"), 1 / MILLISECONDS),
        **seconds("e2e", _good(metrics, "request_latency")),
    }
    return Told(level, tool=tool, differences=_DIFFERENCES, model=text(model))


def _offered(strategy: dict[str, Any]) -> dict[str, Any]:
    kind = strategy.get("type_")
    if kind == "concurrent":
        return {"concurrency": strategy.get("streams")}
    if kind == "synchronous":
        return {"concurrency": 1}
    if kind == "throughput":
        return {"saturation": True}
    if kind in {"constant", "poisson"}:
        return {"rate": strategy.get("rate")}
    raise InputError(
        f"a benchmark of strategy `{kind}` is no level we know",
        hint="known: concurrent, synchronous, throughput, constant, poisson",
    )


def _good(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """A metric over successful requests, with its percentiles beside its mean."""
    found = (metrics.get(name) or {}).get("successful") or {}
    return {**(found.get("percentiles") or {}), "mean": found.get("mean")}
