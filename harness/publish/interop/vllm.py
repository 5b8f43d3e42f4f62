"""The JSON of `vllm bench serve --save-result --save-detailed`, written and read.

Written after `vllm/benchmarks/serve.py` of vLLM 0.32. Where the two measure differently, the values are ours: TTFT ends
at the first chunk with a token (theirs: the first event with `choices`, the role included), E2E at the last such
chunk, and the duration runs from the first measured send to the end of the last stream.
"""

from typing import Any

from harness.errors import InputError
from harness.publish.interop.measured import Measured, distributions, peaks, per_second, total
from harness.publish.interop.told import Told, milliseconds, offered, positive, text
from harness.stats import metrics

PERCENTILES = (50, 90, 95, 99)
BACKENDS = {"chat": "openai-chat", "completions": "openai", "generate": "generate"}
DIFFERENCES = (
    "TTFT ends at the first event with `choices`, a role without text included: it may say when the request was "
    "admitted",
    "TPOT is `tpot_naive_s`, (E2E - TTFT) / (n - 1): with speculation too low by (n - k_1) / (n - 1)",
    "ITL is a gap between events, empty ones included: `chunk_gap_s`, never time per token",
    "arrivals are read times of the client, so its own lateness is in TTFT and in the gaps",
    "throughput is over the whole run, ramp and tail included: `output_tok_s_whole`",
    "percentiles are given for any number of requests",
)


def export(measured: Measured) -> dict[str, Any]:
    """One level as the file's object: its keys and their order, and `harness_*` where the script puts metadata."""
    good, duration = measured.good, measured.duration_s
    gaps = [metrics.chunk_gaps(record) for record in good]
    output = total(record.output_tokens for record in good)
    prompt = total(record.prompt_tokens for record in good)
    both = None if output is None or prompt is None else output + prompt
    events, touched = peaks(good, gaps)
    goodput = measured.result.throughput.goodput_requests_s
    return {
        **_head(measured),
        "duration": duration,
        "completed": len(good),
        "failed": len(measured.records) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": per_second(len(good), duration),
        "request_goodput": goodput,
        "output_throughput": per_second(output, duration),
        "total_token_throughput": per_second(both, duration),
        **_details(measured),
        "max_output_tokens_per_s": events,
        "max_concurrent_requests": touched,
        "rtfx": 0.0,
        **_speculation(measured),
        **_distributions(measured),
    }


def _head(measured: Measured) -> dict[str, Any]:
    result = measured.result
    return {
        "date": measured.date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": BACKENDS[measured.dialect],
        "backend": BACKENDS[measured.dialect],
        "label": measured.label,
        "model_id": measured.model,
        "tokenizer_id": None,
        "num_prompts": len(measured.records),
        "harness_run": f"{measured.run_id}/{measured.launch}/{measured.name}",
        "harness_cell_id": result.cell_id,
        "harness_verdict": result.verdict.state,
        "harness_simulated": str(result.simulated).lower(),
        "request_rate": "inf" if measured.rate is None else measured.rate,
        "burstiness": _burstiness(result.level.get("burstiness")),
        "max_concurrency": measured.concurrency,
    }


def _burstiness(ours: float | str | None) -> float | None:
    """Theirs has no constant arrivals: None."""
    return None if isinstance(ours, str) else ours or 1.0


def _details(measured: Measured) -> dict[str, Any]:
    """A list a key, one entry a request; those of a failed request are what the script leaves there."""
    records = measured.records
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": measured.of_each(lambda record: record.output_tokens, 0),
        "ttfts": measured.of_each(metrics.ttft, 0.0),
        "itls": measured.of_each(metrics.chunk_gaps, []),
        "latencies": measured.of_each(metrics.e2e, 0.0),
        "start_times": [record.sent_s for record in records],
        "queue_times": [record.queued_s or 0.0 for record in records],
        "generated_texts": measured.of_each(lambda record: record.text or "", ""),
        "errors": measured.errors,
    }


def _distributions(measured: Measured) -> dict[str, float]:
    good = measured.good
    samples: dict[str, list[float | None]] = {
        "ttft": [metrics.ttft(record) for record in good],
        "tpot": [metrics.tpot_naive(record) for record in good],
        "itl": [*(gap for record in good for gap in metrics.chunk_gaps(record))],
        "e2el": [metrics.e2e(record) for record in good],
    }
    return distributions(samples, PERCENTILES)


def _speculation(measured: Measured) -> dict[str, Any]:
    """From the server's counters over the level; the script leaves the keys out where nothing was drafted."""
    counters = measured.result.server
    drafts, drafted, accepted = (counters.get(key) for key in ("drafts", "draft_tokens", "accepted_tokens"))
    if not drafts or not drafted or accepted is None:
        return {}
    return {
        "spec_decode_acceptance_rate": accepted / drafted * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [],
    }


def read(data: dict[str, Any]) -> Told:
    """One such object as a level of a reference.

    Raises:
        InputError: it is not this script's, or measured no generation.
    """
    if "output_throughput" not in data or "max_concurrency" not in data:
        raise InputError("no `output_throughput` and `max_concurrency`: not the result of a generation benchmark")
    level = {
        **offered(data),
        "output_tok_s": data["output_throughput"],
        "requests": data.get("num_prompts"),
        "ok": data.get("completed"),
        "acceptance_length": positive(data.get("spec_decode_acceptance_length")),
        **milliseconds(data, {"ttft": "ttft", "tpot": "tpot_naive", "itl": "chunk_gap", "e2el": "e2e"}),
    }
    return Told(
        level,
        tool=f"vllm bench serve, backend {data.get('backend')}",
        differences=DIFFERENCES,
        model=text(data.get("model_id")),
        date=text(data.get("date")),
        label=text(data.get("label")),
    )
