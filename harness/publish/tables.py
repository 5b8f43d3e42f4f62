"""Results as people read them: the one place where units and digits are chosen.

Seconds inside become milliseconds here; a value that is not known is `-`, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from harness.files import escape_control
from harness.stats.level import LevelResult, Summary

if TYPE_CHECKING:  # levels are shown without knowing what a comparison is, which takes time to import
    from rich.table import Table

    from harness.stats.comparison import Comparison, Estimate, Row
    from harness.stats.factorial import Factorial

_ABSENT = "-"
_LONG_NAME = 20


def seeds_row(result: LevelResult) -> str:
    """One level in the row form that `benchmark_parallel.py` printed, so that old tables compare line by line.

    The throughput is the whole run's, as it was there.
    """
    e2e = result.metrics.get("e2e_s") or Summary(n=0)
    spread = "/".join(f"{_fixed(value, 1):>6}" for value in (e2e.mean, e2e.p50, e2e.p99 or e2e.maximum))
    throughput = result.throughput
    return (
        f"{_level_label(result)} | {result.requests} requests"
        f" | throughput: {_fixed(throughput.output_tok_s_whole, 1):>7} tok/s"
        f" | per-req: {_fixed(throughput.per_request_tok_s, 1):>6} tok/s"
        f" | latency avg/p50/p99: {spread}s | ok: {result.ok}/{result.requests}"
        + ("" if throughput.goodput_requests_s is None else f" | goodput: {throughput.goodput_requests_s:.2f} req/s")
    )


def level_header() -> tuple[str, ...]:
    """The columns of `level_row`."""
    return (
        "level",
        "tok/s",
        "whole",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "gap ms p99",
        "E2E s",
        "ok",
        "accept",
        "lag ms p99",
        "verdict",
    )


def level_row(result: LevelResult) -> tuple[str, ...]:
    """One level with the design's metrics: `tok/s` over the steady window, means where no percentile is named."""
    metrics = {name: result.metrics.get(name) or Summary(n=0) for name in ("ttft_s", "tpot_s", "chunk_gap_s", "e2e_s")}
    lag = result.client.get("lag_p99_s")
    return (
        _level_label(result),
        _fixed(result.throughput.output_tok_s, 1),
        _fixed(result.throughput.output_tok_s_whole, 1),
        _milli(metrics["ttft_s"].mean),
        _milli(metrics["ttft_s"].p99),
        _milli(metrics["tpot_s"].mean),
        _milli(metrics["chunk_gap_s"].p99),
        _fixed(metrics["e2e_s"].mean, 2),
        f"{result.ok}/{result.requests}",
        _fixed(result.server.get("acceptance_length"), 2),
        _milli(lag),
        result.verdict.state,
    )


def levels_table(results: Iterable[LevelResult], title: str) -> Table:
    """The levels of one launch."""
    return _table(title, *levels(list(results)))


def levels(results: Sequence[LevelResult]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of levels; goodput has a column where any of them has objectives."""
    if all(result.throughput.goodput_requests_s is None for result in results):
        return level_header(), [level_row(result) for result in results]
    rows = [(*level_row(result), _fixed(result.throughput.goodput_requests_s, 2)) for result in results]
    return (*level_header(), "goodput req/s"), rows


def comparison_header(comparison: Comparison) -> tuple[str, ...]:
    """The columns of `comparison_row`; arms by their part in it where their names would take the room of figures."""
    return (
        "level",
        f"{_short(comparison.base, 'base')} tok/s",
        f"{_short(comparison.treatment, 'treatment')} tok/s",
        "ratio",
        f"{comparison.confidence:.0%} interval",
        "TPOT ratio",
        "launches",
        "verdict",
    )


def _short(name: str, part: str) -> str:
    return name if len(name) <= _LONG_NAME else part


def comparison_row(row: Row) -> tuple[str, ...]:
    """One level of a comparison; where it is not comparable, both figures and no ratio, which would be a claim."""
    estimate = row.estimate
    claim, tpot = (None, None) if row.verdict == "not comparable" else (estimate, row.secondary.get("tpot_s"))
    return (
        row.key if row.concurrency is None or not row.key.startswith("c") else f"C={row.concurrency}",
        _fixed(estimate.base, 1) if estimate else _ABSENT,
        _fixed(estimate.treatment, 1) if estimate else _ABSENT,
        _fixed(claim.ratio, 3) if claim else _ABSENT,
        _interval(claim),
        _fixed(tpot.ratio, 3) if tpot else _ABSENT,
        str(estimate.launches) if estimate else _ABSENT,
        _verdict(row),
    )


def comparison_table(comparison: Comparison) -> Table:
    """A comparison, level by level."""
    title = f"{comparison.treatment} against {comparison.base}{_labels(comparison)}"
    return _table(title, comparison_header(comparison), [comparison_row(row) for row in comparison.rows])


def comparison_markdown(comparison: Comparison) -> str:
    """A comparison as a Markdown table with its sentence."""
    lines = [
        f"**{comparison.treatment} against {comparison.base}**{_labels(comparison)}: {comparison.summary}",
        "",
        *markdown_table(comparison_header(comparison), [comparison_row(row) for row in comparison.rows]),
        "",
        *(f"- {line}" for line in comparison_notes(comparison)[1:]),
    ]
    return "\n".join(lines)


def levels_markdown(results: Iterable[LevelResult]) -> str:
    """Levels as a Markdown table."""
    return "\n".join(markdown_table(*levels(list(results))))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, columns after the first right-aligned; pipes in cells are escaped."""
    lines = [
        "| " + " | ".join(_cell(name) for name in header) + " |",
        "| --- |" + " ---: |" * (len(header) - 1),
    ]
    return lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def comparison_notes(comparison: Comparison) -> list[str]:
    """Everything worth saying under a comparison's table, each once: the answer, why to distrust it, then notes."""
    lines = [comparison.summary]
    if comparison.saturation:
        lines.append(comparison.saturation.sentence)
    if comparison.policy:
        lines.append(comparison.policy.sentence)
    lines += [f"suspect: {reason.message}" for reason in comparison.suspect]
    lines += [f"warning: {reason.message}" for reason in comparison.fairness.warnings]
    said = _by_text(comparison.rows).items()
    lines += [f"{', '.join(keys)}: {text}" for text, keys in said if text not in comparison.summary]
    lines += [f"{row.key}: {row.speculation.sentence}" for row in comparison.rows if row.speculation]
    lines += comparison.notes
    if comparison.equivalence:
        lines.append(comparison.equivalence.sentence)
    return list(dict.fromkeys(lines))


def beyond_notes(factorial: Iterable[Factorial], promises: Iterable[str]) -> list[str]:
    """What an answer says beyond its comparisons: effects of a 2x2 by level, and promises of adaptive arms."""
    lines = [f"{found.level}: {effect.sentence}" for found in factorial for effect in found.effects]
    return [*lines, *promises]


def _by_text(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Reasons and notes of rows, each with the levels that it is about."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for text in (*(reason.message for reason in row.reasons), *row.notes):
            found.setdefault(text, []).append(row.key)
    return found


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only where a table is shown

    table, listed = Table(title=title, title_justify="left", header_style="bold"), list(rows)
    for index, name in enumerate(header):
        last = index == len(header) - 1
        # Where space is short a heading and the last column's words may take two lines; a number never may.
        heading = name if last else _stacked(name, max((len(row[index]) for row in listed), default=0))
        table.add_column(heading, justify="left" if index == 0 or last else "right", no_wrap=not last)
    for row in listed:
        table.add_row(*row)
    return table


def _stacked(heading: str, cell: int) -> str:
    """A heading in lines that are hardly wider than its column's widest cell."""
    lines: list[str] = []
    for word in heading.split():
        if lines and len(lines[-1]) + 1 + len(word) <= max(cell, 8):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def _level_label(result: LevelResult) -> str:
    level = result.level
    if level.get("mode") == "closed":
        return f"C={level['concurrency']:>3}"
    return str(level.get("name", level.get("mode", "level")))


def _labels(comparison: Comparison) -> str:
    words = ["simulated"] if comparison.simulated else []
    words += [f"{name}: published, not measured here" for name in comparison.published]
    return f" ({'; '.join(words)})" if words else ""


def _verdict(row: Row) -> str:
    if row.verdict == "unresolved" and row.more_launches:
        return f"unresolved ({row.more_launches} more launch{'es' if row.more_launches > 1 else ''})"
    return row.verdict


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.interval is None:
        return _ABSENT
    return f"{estimate.interval.low:.3f} to {estimate.interval.high:.3f}"


def _milli(value: float | None) -> str:
    return _fixed(value * 1e3 if value is not None else None, 1)


def _fixed(value: float | None, digits: int) -> str:
    return _ABSENT if value is None else f"{value:.{digits}f}"


def _cell(text: str) -> str:
    return escape_control(text.replace("\n", " ")).replace("|", "\\|").replace("<", "&lt;")
