"""The result of one level: what `level.json` holds. `stats.metrics` and `stats.validity` make it, everyone reads it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT = "harness.level/1"
MEASUREMENT = "harness.measurement/1"  # version of the metric definitions; levels of different ones are not compared


class Stored(BaseModel):
    """Base of every model the harness itself stores: frozen, unknown keys refused, None is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Summary(Stored):
    """One metric over a level's good requests. A percentile the sample cannot support is None.

    `bounds` holds the 95 % order-statistic bounds of the percentiles that are shown; an end is None where the sample
    has none that far out. They speak of requests like these within this launch.
    """

    n: int
    mean: float | None = None
    std: float | None = None
    minimum: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    maximum: float | None = None
    bounds: dict[str, tuple[float | None, float | None]] = {}


class Reason(Stored):
    """Why a level is suspect or invalid: a stable code, a sentence with the numbers in it."""

    code: str
    message: str


class Verdict(Stored):
    """Whether a level's numbers count."""

    state: Literal["valid", "suspect", "invalid", "not run"]
    reasons: tuple[Reason, ...] = ()


class Window(Stored):
    """The steady window, seconds from the level's start; None where in-flight never reached the level."""

    start_s: float | None
    end_s: float | None


class Throughput(Stored):
    """Tokens and requests a second. `output_tok_s` is over the steady window, `*_whole` from first send to last byte.

    `per_request_tok_s` is the mean over requests of output tokens / E2E: the seeds' `per-req`. `goodput_requests_s`
    counts only requests that keep every objective of the level's `goodput`; None where the level has none.
    """

    output_tok_s: float | None
    output_tok_s_whole: float | None
    total_tok_s_whole: float | None = None
    requests_s_whole: float | None = None
    per_request_tok_s: float | None = None
    goodput_requests_s: float | None = None


class LevelResult(Stored):
    """Everything `level.json` says about one cell. All times in seconds."""

    format: str = FORMAT
    measurement: str  # version of the metric definitions
    cell_id: str
    arm: str
    launch: str
    block: int
    level: dict[str, Any]  # {"mode": "closed", "concurrency": 4, "requests": 30} ...
    started_at: str  # wall clock, ISO 8601, UTC
    simulated: bool = False
    requests: int
    ok: int
    failures: dict[str, int] = {}
    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counter: str | None = None
    window: Window
    throughput: Throughput
    metrics: dict[
        str, Summary
    ]  # ttft_s tpot_s tpot_naive_s chunk_gap_s token_itl_s e2e_s queued_s connect_s send_skew_s
    client: dict[str, Any] = {}  # lag_p99_s cpu_s kernel_stamps merged_share peak_in_flight mean_in_flight capacity ...
    server: dict[str, Any] = {}  # counter deltas by our names, acceptance_length ...
    verdict: Verdict
