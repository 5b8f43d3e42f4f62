"""A level cut into equal slices of time: how much its throughput moves while one server runs."""

from collections.abc import Sequence

import numpy as np

from harness.load.records import Chunk, RequestRecord
from harness.stats.level import LevelResult

COUNT = 12


def throughput(result: LevelResult, records: Sequence[RequestRecord], count: int = COUNT) -> tuple[float, ...]:
    """Output tok/s in equal slices of a level's steady window, in order.

    A chunk's tokens count where it arrived; where the engine does not say how many a chunk carries, a request's output
    tokens are spread evenly over its chunks.

    Args:
        result: the level, for its window.
        records: its requests.
        count: how many slices.

    Returns:
        `count` figures; none where there is no steady window or nothing arrived in it.
    """
    start, end = result.window.start_s, result.window.end_s
    if start is None or end is None or end <= start:
        return ()
    arrivals = [(chunk.at_s, tokens) for record in records if record.ok for chunk, tokens in _weighted(record)]
    if not arrivals:
        return ()
    times, tokens = np.array(arrivals, dtype=float).T
    totals, _ = np.histogram(times, bins=count, range=(start, end), weights=tokens)
    return tuple(float(total) for total in totals * count / (end - start))


def _weighted(record: RequestRecord) -> list[tuple[Chunk, float]]:
    even = (record.output_tokens or 0) / len(record.chunks) if record.chunks else 0.0
    return [(chunk, even if chunk.tokens is None else float(chunk.tokens)) for chunk in record.chunks]
