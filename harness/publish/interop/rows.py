"""Requests as flat rows, one JSON object a line: what DuckDB, Polars and pandas read as a table."""

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any

from harness.load.records import RequestRecord
from harness.publish.interop.measured import Measured
from harness.stats import metrics


def text(levels: Sequence[Measured]) -> str:
    """Every measured request of the levels, a line each; every row has every key."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(levels))


def rows(levels: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """The rows: where a request belongs, what became of it, and the metrics of docs/metrics.md, in seconds."""
    for one in levels:
        where = {
            "run": one.run_id,
            "launch": one.launch,
            "arm": one.result.arm,
            "block": one.result.block,
            "level": one.name,
            "concurrency": one.concurrency,
            "rate": one.rate,
            "verdict": one.result.verdict.state,
            "simulated": one.result.simulated,
        }
        for record in one.records:
            sent = one.date + datetime.timedelta(seconds=record.sent_s)
            yield {**where, "sent_at": sent.isoformat(timespec="microseconds"), **_facts(record), **_derived(record)}


def _facts(record: RequestRecord) -> dict[str, Any]:
    names = (
        "index slot prompt_id sent_s end_s ok reason status prompt_tokens cached_tokens output_tokens counter "
        "finish_reason queued_s connect_s kernel_stamps"
    )
    return {name: getattr(record, name) for name in names.split()}


def _derived(record: RequestRecord) -> dict[str, Any]:
    return {
        "ttft_s": metrics.ttft(record),
        "tpot_s": metrics.tpot(record),
        "tpot_naive_s": metrics.tpot_naive(record),
        "e2e_s": metrics.e2e(record),
        "chunk_gaps_s": metrics.chunk_gaps(record),
        "chunk_tokens": [chunk.tokens for chunk in record.chunks],
    }
