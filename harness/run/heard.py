"""What a server's log says of one level's speed, and what the client saw over the very same stretch of time.

Two measures of one thing: where they differ, one of the two is wrong. Pure.
"""

import datetime
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.engines.engine import LogFigures
from harness.load.records import LevelTrace, RequestRecord
from harness.run.logs import REAPER, LogLine
from harness.stats.level import Window
from harness.stats.metrics import chunk_gaps, window_tokens

_EDGES = 2  # ends of a stretch, at each of which one step's tokens may fall on either side


class _Said(NamedTuple):
    """One figure: when it was written (s since 1970), by whom, what it says, and half a unit of its last digit."""

    at: float
    who: tuple[str, str]
    value: float
    rounding: float


def heard(lines: Sequence[LogLine], figures: LogFigures, trace: LevelTrace) -> dict[str, Any]:
    """The log's own figures for one level.

    Args:
        lines: what was logged while the level ran.
        figures: how the engine writes them.
        trace: the level.

    Returns:
        `tokens` and `requests`: output tokens of the requests that ended, and how many lines said so;
        `acceptance_length`: mean tokens a verification step;
        `output_tok_s`, `client_tok_s`, `slack`, `span_s`: the rate by the log from its first line to its last, the
        client's over the same time, and how far apart they may be: for what falls on either side of the two ends,
        and for the digits that the log leaves out.
        What the log does not say is left out.
    """
    ended = list(_said(lines, figures.tokens))
    lengths = [said.value for said in _said(lines, figures.acceptance) if said.value > 0]
    found: dict[str, Any] = {}
    if ended:
        found |= {"tokens": int(sum(said.value for said in ended)), "requests": len(ended)}
    if lengths:
        found["acceptance_length"] = float(np.mean(lengths))
    return found | _rates(list(_said(lines, figures.rate)), trace)


def _said(lines: Sequence[LogLine], regex: str | None) -> Iterator[_Said]:
    if regex is None:
        return
    pattern = re.compile(regex)
    for line in lines:
        if line.writer != REAPER and (match := pattern.search(line.text)):
            at = datetime.datetime.fromisoformat(line.at).timestamp()
            rounding = 0.5 * 10.0 ** -len(match["value"].partition(".")[2])
            yield _Said(at, (line.writer, match.groupdict().get("who") or ""), float(match["value"]), rounding)


def _rates(said: Sequence[_Said], trace: LevelTrace) -> dict[str, float]:
    """The log's rate against the client's; nothing where several processes each tell a part of it."""
    arrivals = [chunk.at_s for record in trace.records for chunk in record.chunks]
    if not arrivals or len({one.who for one in said}) != 1 or not all(record.ok for record in trace.records):
        return {}
    first, last = trace.started_at + min(arrivals), trace.started_at + max(arrivals)
    inside = [one for one in said if first <= one.at <= last]
    if len(inside) < 2:
        return {}
    span = inside[-1].at - inside[0].at
    # Each line is the mean since the one before, so that times the time between them is tokens.
    tokens = sum(one.value * (one.at - before.at) for before, one in itertools.pairwise(inside))
    window = Window(start_s=inside[0].at - trace.started_at, end_s=inside[-1].at - trace.started_at)
    client = window_tokens(trace.records, window)
    if not client or not tokens:
        return {}
    return {
        "output_tok_s": tokens / span,
        "client_tok_s": client,
        "slack": _unsure(trace.records, window, client) / (client * span) + inside[0].rounding / client,
        "span_s": span,
    }


def _unsure(records: Sequence[RequestRecord], window: Window, rate: float) -> float:
    """Tokens that may fall on either side: a step's at each end, and one a request, which engines count differently
    (a first token belongs to its prefill; a scheduler that works ahead decodes one too many)."""
    gaps = [gap for record in records for gap in chunk_gaps(record) if gap > 0]
    start, end = window.start_s or 0.0, window.end_s or 0.0
    requests = sum(record.sent_s < end and record.end_s > start for record in records)
    return _EDGES * rate * float(np.median(gaps)) + requests if gaps else float(requests)
