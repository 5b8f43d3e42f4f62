"""The JSON line of SGLang's `bench_serving --output-file --output-details`, written and read.

Written after `sglang/benchmark/serving.py` of SGLang 0.5.23. What it calls ITL depends on its backend: of the native
stream each chunk's gap over its tokens, once a token; of an OpenAI stream the gap between chunks.
"""

from typing import Any

from harness.errors import InputError
from harness.load.records import RequestRecord
from harness.publish.interop.measured import Measured, distributions, peaks, per_second, total
from harness.publish.interop.told import Told, milliseconds, offered, positive, text
from harness.stats import metrics

PERCENTILES = (90, 95, 99)
NATIVE = "sglang"
BACKENDS = {"chat": "sglang-oai-chat", "completions": "sglang-oai", "generate": NATIVE}
# Retokenized tokens and datasets of its own are things we have not: null, as where the script has none.
_ABSENT = ("sharegpt_output_len", "random_input_len", "random_output_len", "random_range_ratio")
_DIFFERENCES = (
    "each request opens its own connection, and connecting is inside TTFT and E2E",
    "E2E ends at the stream's last line, `[DONE]` included, not at the last token",
    "TPOT is `tpot_naive_s`, (E2E - TTFT) / (n - 1): with speculation too low by (n - k_1) / (n - 1)",
    "input tokens are those of the prompts as the client tokenized them, without the chat template",
    "arrivals are read times of the client, so its own lateness is in TTFT and in the gaps",
    "throughput is over the whole run, ramp and tail included: `output_tok_s_whole`",
    "percentiles are given for any number of requests",
)
_NATIVE_ITL = "ITL is each chunk's gap over its tokens, once a token: `token_itl_s`"
_OPENAI_ITL = (
    "ITL is the gap between chunks: `chunk_gap_s` (rebuilt by tokenizing each chunk where `accept_length` is given)"
)


def export(measured: Measured) -> dict[str, Any]:
    """One level as the line's object: its keys and their order; `tag` says where the numbers come from."""
    good, duration = measured.good, measured.duration_s
    gaps = [_gaps(measured, record) for record in good]
    output = total(record.output_tokens for record in good)
    prompt = total(record.prompt_tokens for record in good)
    both = None if output is None or prompt is None else output + prompt
    events, touched = peaks(good, gaps)
    spans = [metrics.e2e(record) or 0.0 for record in good]
    return {
        "tag": measured.label,
        "backend": BACKENDS[measured.dialect],
        "dataset_name": measured.arm.workload["prompts"],
        "request_rate": float("inf") if measured.rate is None else measured.rate,
        "max_concurrency": measured.concurrency,
        **dict.fromkeys(_ABSENT),
        "server_info": (measured.started.get("answers") or {}).get("/server_info"),
        "duration": duration,
        "completed": len(good),
        "total_input_tokens": prompt,
        "total_input_text_tokens": prompt,
        "total_input_vision_tokens": 0,
        "total_output_tokens": output,
        "total_output_tokens_retokenized": None,
        "request_throughput": per_second(len(good), duration),
        "input_throughput": per_second(prompt, duration),
        "output_throughput": per_second(output, duration),
        "total_throughput": per_second(both, duration),
        **_distributions(measured, gaps),
        "concurrency": per_second(sum(spans), duration),
        "accept_length": measured.result.server.get("acceptance_length"),
        "max_output_tokens_per_s": events,
        "max_concurrent_requests": touched,
        **_details(measured),
    }


def _gaps(measured: Measured, record: RequestRecord) -> list[float]:
    native = BACKENDS[measured.dialect] == NATIVE
    return metrics.token_gaps(record) if native else metrics.chunk_gaps(record)


def _distributions(measured: Measured, gaps: list[list[float]]) -> dict[str, float]:
    good = measured.good
    samples: dict[str, list[float | None]] = {
        "e2e_latency": [metrics.e2e(record) for record in good],
        "ttft": [metrics.ttft(record) for record in good],
        "tpot": [metrics.tpot_naive(record) for record in good],
        "itl": [*(gap for waits in gaps for gap in waits)],
    }
    return distributions(samples, PERCENTILES)


def _details(measured: Measured) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_tokens for record in measured.records],
        "output_lens": measured.of_each(lambda record: record.output_tokens, 0),
        "ttfts": measured.of_each(metrics.ttft, 0.0),
        "itls": measured.of_each(lambda record: _gaps(measured, record), []),
        "generated_texts": measured.of_each(lambda record: record.text or "", ""),
        "errors": measured.errors,
    }


def read(data: dict[str, Any]) -> Told:
    """One such object as a level of a reference.

    Raises:
        InputError: it is not this script's.
    """
    if "output_throughput" not in data or "backend" not in data:
        raise InputError("no `output_throughput` and `backend`: not a line of bench_serving")
    native = data["backend"] == NATIVE
    itl = "token_itl" if native else "chunk_gap"
    detailed = isinstance(data.get("errors"), list)  # without --output-details it does not say how many were asked
    level = {
        **offered(data),
        "output_tok_s": data["output_throughput"],
        "requests": len(data["errors"]) if detailed else None,
        "ok": data.get("completed") if detailed else None,
        "acceptance_length": positive(data.get("accept_length")),
        **milliseconds(data, {"ttft": "ttft", "tpot": "tpot_naive", "itl": itl, "e2e_latency": "e2e"}),
    }
    return Told(
        level,
        tool=f"SGLang bench_serving, backend {data['backend']}",
        differences=(_NATIVE_ITL if native else _OPENAI_ITL, *_DIFFERENCES),
        label=text(data.get("tag")),
    )
