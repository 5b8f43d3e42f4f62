"""aiperf's `profile_export_aiperf.json`, read. After what aiperf 0.13 writes."""

from typing import Any

from harness.errors import InputError
from harness.publish.interop.told import MILLISECONDS, Told, positive, seconds, text

_DIFFERENCES = (
    "E2E ends at the last content chunk, TTFT at the first content or reasoning: as ours, but by read times of the "
    "client, so its own lateness is in them",
    "inter-chunk latency is `chunk_gap_s`",
    "throughput is over the whole run, ramp and tail included: `output_tok_s_whole`",
    "percentiles are given for any number of requests",
)
_NAIVE = "ITL is (E2E - TTFT) / (n - 1), one a request: `tpot_naive_s`"
_PER_CHUNK = "ITL is (E2E - TTFT) / (n - k_1), one a request, by --per-chunk-usage: `tpot_s`"


def read(data: dict[str, Any]) -> Told:
    """The file as a level of a reference.

    Raises:
        InputError: it is not such a file, or what it offered is neither a concurrency nor a rate.
    """
    if "output_token_throughput" not in data or "aiperf_version" not in data:
        raise InputError("no `aiperf_version` and `output_token_throughput`: not `profile_export_aiperf.json`")
    config = data.get("input_config") or {}
    endpoint = config.get("endpoint") or {}
    rate, counted = _rate(data)
    exact = bool(endpoint.get("per_chunk_usage"))
    models = [item.get("name") for item in (config.get("models") or {}).get("items", [])]
    asked = _figure(data, "completed_request_count") or _figure(data, "request_count")
    failed = _figure(data, "error_request_count") or 0.0
    per_token = (
        {} if counted else seconds("tpot" if exact else "tpot_naive", *_milliseconds(data, "inter_token_latency"))
    )
    level = {
        **_offered(config),
        "output_tok_s": rate,
        "requests": None if asked is None else int(asked),
        "ok": None if asked is None else int(asked - failed),
        **seconds("ttft", *_milliseconds(data, "time_to_first_token")),
        **seconds("e2e", *_milliseconds(data, "request_latency")),
        **seconds("chunk_gap", *_milliseconds(data, "inter_chunk_latency")),
        **per_token,
    }
    itl = (_PER_CHUNK if exact else _NAIVE,) if not counted else ()
    return Told(
        level,
        tool=f"aiperf {data['aiperf_version']}",
        differences=(*counted, *itl, *_DIFFERENCES),
        model=", ".join(filter(None, map(text, models))) or None,
        date=text(data.get("start_time")),
    )


def _rate(data: dict[str, Any]) -> tuple[float | None, tuple[str, ...]]:
    """Output tokens a second, by the server's count where the file has one; what is to be said where the two differ."""
    said, duration = _figure(data, "output_token_throughput"), _figure(data, "benchmark_duration")
    ours, theirs = _figure(data, "total_usage_completion_tokens"), _figure(data, "total_output_tokens")
    if ours is None or duration is None or ours == theirs:
        return said, ()
    return ours / duration, (
        f"aiperf counted {theirs or 0:.0f} output tokens with its own tokenizer and the server {ours:.0f}: its "
        f"{said or 0:.1f} tok/s is given here by the server's count, and its ITL, per token of its own, is left out",
    )


def _offered(config: dict[str, Any]) -> dict[str, Any]:
    """The profiling phase's rate, else its concurrency: a rate may be capped by one."""
    for phase in config.get("phases", []):
        rate, concurrency = positive(phase.get("rate")), positive(phase.get("concurrency"))
        if phase.get("kind", "profiling") == "profiling" and (rate or concurrency):
            return {"rate": rate} if rate else {"concurrency": int(concurrency or 0)}
    raise InputError("`input_config.phases` says neither a concurrency nor a rate: not a level we know")


def _milliseconds(data: dict[str, Any], name: str) -> tuple[dict[str, Any], float]:
    """A metric's figures by our names, and the factor to seconds."""
    figures = data.get(name) or {}
    return {**figures, "mean": figures.get("avg")}, 1 / MILLISECONDS


def _figure(data: dict[str, Any], name: str) -> float | None:
    return positive((data.get(name) or {}).get("avg"))
