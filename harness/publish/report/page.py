"""One report as one HTML file: no other file, no network, and no script but its own.

The page's Content-Security-Policy names the digests of its style sheet and of its two scripts, and allows nothing
else: what a server, a prompt or a recipe wrote cannot run, whatever it looks like. Vega interprets its expressions, so
that no `eval` is needed. Data stands in a JSON block, with every string as text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Any

import orjson
from jinja2 import Environment, Template
from markupsafe import Markup, escape

from harness import __version__
from harness.files import digest, escape_control
from harness.publish import tables
from harness.publish.report import bundle, charts, findings, provenance, raw_charts, samples, shared
from harness.publish.report.drawing import PAGE, Chart, Rows
from harness.publish.report.samples import Budget, Sample
from harness.publish.report.shown import FEW, Launch, Level, Shown, between, named, treatments, tried, verdict_counts
from harness.stats.comparison import Comparison
from harness.stats.level import MEASUREMENT

_OPEN = 3  # runs whose sections are open from the start


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; `states` gives the class of a row by its verdict."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    states: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with its heading and, where there are several to choose from, the name of the choice.

    `lead` is what holds for all of them; each has a note of its own.
    """

    id: str
    title: str
    charts: Sequence[Chart]
    choice: str = ""
    wide: bool = False
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """One comparison as a page shows it."""

    title: str
    decision: str
    sentence: str
    table: Table
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Section:
    """One run or published table as a page shows it."""

    id: str
    shown: Shown
    answers: Sequence[Answered]
    beyond: Sequence[str]
    findings: Mapping[str, Sequence[findings.Finding]]
    figures: Sequence[Figure]
    tables: Sequence[Table]
    facts: Sequence[provenance.Fact]
    reproduce: str
    blocks: Sequence[tuple[provenance.Block, str]]
    summary: str


def render(shown: Sequence[Shown]) -> str:
    """The whole page. The same records give the same bytes."""
    budget = Budget.of(sum(1 for one in shown for _ in one.levels()))
    texts = _Once()
    sections = [_section(f"run-{number}", one, budget, texts) for number, one in enumerate(shown, start=1)]
    across = between(shown)
    overview = _overview(shown, across)
    every = [*overview, *(figure for section in sections for figure in section.figures)]
    library, own, style = bundle.script(), _asset("page.js"), _asset("page.css")
    return _template().render(
        title=_title(shown),
        policy=_policy(scripts=(library, own), style=style),
        style=Markup(style),
        library=Markup(_closed(library)),
        own=Markup(own),
        data=Markup(_data(every)),
        sections=sections,
        overview=overview,
        course=_runs_table(shown, sections) if len(shown) > 1 else None,
        across=[_answered(comparison) for comparison in across],
        simulated=_simulated(shown),
        open=len(shown) <= _OPEN,
        version=__version__,
        measurement=MEASUREMENT,
        budget=budget,
    )


def _title(shown: Sequence[Shown]) -> str:
    if len(shown) == 1:
        return shown[0].question
    questions = list(dict.fromkeys(one.question for one in shown))
    return questions[0] if len(questions) == 1 else f"{len(shown)} runs"


def _simulated(shown: Sequence[Shown]) -> str:
    """What of it a cost model made; empty for none of it."""
    if not any(one.simulated for one in shown):
        return ""
    return "these numbers" if all(one.simulated for one in shown) else "some of these numbers"


def _section(identity: str, one: Shown, budget: Budget, texts: "_Once") -> Section:
    taken, one = _sampled(one, budget)
    comparisons = one.answer.comparisons if one.answer else ()
    counts = [f"{count} {state}" for state, count in verdict_counts(one.levels()).items() if count]
    return Section(
        id=identity,
        shown=one,
        answers=[_answered(comparison) for comparison in comparisons],
        beyond=findings.beyond(one),
        findings={
            "Does it count?": findings.validity(one),
            "Is it fair?": findings.fairness(comparisons),
            "What next?": findings.next_steps(one, comparisons),
        },
        figures=_figures(identity, one, comparisons, taken),
        tables=[_launch_table(launch) for launch in one.launches if launch.levels],
        facts=provenance.facts(one),
        reproduce=provenance.reproduce(one),
        blocks=[
            (block, texts.seen(block.text, f"{identity}-{number}"))
            for number, block in enumerate(provenance.blocks(one))
        ],
        summary=f"{one.state}; levels: {', '.join(counts) or 'none'}",
    )


def _sampled(one: Shown, budget: Budget) -> tuple[list[Sample], Shown]:
    """The raw data of a run's levels, and the run with what of that could not be read among its troubles."""
    if (run := one.run) is None:
        return [], one
    troubles = list(one.troubles)
    taken = [tried(partial(samples.take, run, level, budget), None, troubles) for level in one.levels()]
    return [sample for sample in taken if sample], replace(one, troubles=tuple(troubles))


class _Once:
    """Long texts that several runs share stand once in a page, and are pointed at elsewhere."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def seen(self, text: str, place: str) -> str:
        """Where the same text stands already; empty when it is new, and stands at `place` from now on."""
        key = digest(text)
        if key in self._known:
            return self._known[key]
        self._known[key] = place
        return ""


# Figures


def _figures(identity: str, one: Shown, comparisons: Sequence[Comparison], taken: Sequence[Sample]) -> list[Figure]:
    names = named([one])
    load = "Throughput over concurrency"
    found = [
        _figure(f"{identity}-throughput", load, [charts.throughput([one], PAGE)]),
        _figure(f"{identity}-rate", "Throughput over offered rate", [charts.throughput([one], PAGE, open_loop=True)]),
        _figure(f"{identity}-ratio", "Treatment over base", [charts.ratio(comparisons, treatments([one]), PAGE)]),
        _figure(
            f"{identity}-pareto", "Latency over throughput", charts.pareto([one], PAGE), "latency", lead=charts.PARETO
        ),
        _figure(f"{identity}-acceptance", "Acceptance length over concurrency", [charts.acceptance([one], PAGE)]),
    ]
    for metric, title in _DISTRIBUTED.items():
        chart = raw_charts.distribution(taken, names, one.name, PAGE, metric)
        found.append(_figure(f"{identity}-{metric}", title, [chart]))
    drawn = [raw_charts.timeline(sample, PAGE) for sample in taken if sample.timeline.bars]
    timeline = _figure(
        f"{identity}-timeline", "Requests over time", drawn, "level", wide=True, lead=raw_charts.TIMELINE
    )
    return [figure for figure in (*found, timeline) if figure]


_DISTRIBUTED = {
    "ttft_s": "Time to first token by level",
    "tpot_s": "Time per output token by level",
    "chunk_gap_s": "Gaps between chunks by level",
}


def _overview(shown: Sequence[Shown], across: Sequence[Comparison]) -> list[Figure]:
    """What is drawn of several runs together."""
    if len(shown) < 2:
        return []
    if len(shown) > FEW:
        found = [_figure("all-course", "Throughput run by run", charts.course(shown, PAGE), "level", wide=True)]
    else:
        found = [
            _figure("all-throughput", "Throughput over concurrency, all runs", [charts.throughput(shown, PAGE)]),
            _figure("all-ratio", "Later runs over the first", [charts.ratio(across, treatments(shown), PAGE)]),
            _figure(
                "all-pareto",
                "Latency over throughput, all runs",
                charts.pareto(shown, PAGE),
                "latency",
                lead=charts.PARETO,
            ),
        ]
    return [figure for figure in found if figure]


def _figure(
    identity: str, title: str, drawn: Iterable[Chart | None], choice: str = "", *, wide: bool = False, lead: str = ""
) -> Figure | None:
    known = [chart for chart in drawn if chart]
    return Figure(identity, title, known, choice, wide, lead) if known else None


# Tables


def _answered(comparison: Comparison) -> Answered:
    rows = [tables.comparison_row(row) for row in comparison.rows]
    sentence = findings.headline(comparison)
    return Answered(
        title=f"{comparison.treatment} against {comparison.base}",
        decision=comparison.policy.decision if comparison.policy else "",
        sentence=sentence,
        table=Table(
            f"{comparison.treatment} against {comparison.base}, by level",
            tables.comparison_header(comparison),
            rows,
            [row.verdict.replace(" ", "-") for row in comparison.rows],
        ),
        notes=[note for note in tables.comparison_notes(comparison) if note.casefold() not in sentence.casefold()],
    )


def _launch_table(launch: Launch) -> Table:
    results = [level.result for level in launch.levels if level.result]
    if not results:
        return _published_table(launch)
    label = " (simulated)" if results[0].simulated else ""
    header, rows = tables.levels(results)
    states = [result.verdict.state.replace(" ", "-") for result in results]
    return Table(f"Launch {launch.name}{label}", header, rows, states)


def _published_table(launch: Launch) -> Table:
    names = list(
        dict.fromkeys(name for level in launch.levels for name in level.cell.values if name != "output_tok_s_whole")
    )
    rows = [[level.label, *(_number(level, name) for name in names), level.cell.state] for level in launch.levels]
    return Table(
        f"{launch.name} (published)", ["level", *names, "verdict"], rows, [level.cell.state for level in launch.levels]
    )


def _number(level: Level, name: str) -> str:
    value = level.cell.values.get(name)
    return "-" if value is None else f"{value:.4g}"


def _runs_table(shown: Sequence[Shown], sections: Sequence[Section]) -> Table:
    rows = []
    for one, section in zip(shown, sections, strict=True):
        said = "; ".join(f"{found.title}: {found.decision or found.sentence}" for found in section.answers)
        rows.append([section.id, one.name, section.summary, said or "no comparison"])
    return Table("Runs in this report", ["run", "state", "answer"], rows)


# The file


def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible)
    environment.filters["prose"] = prose
    return environment.from_string(_asset("page.html"))


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _visible(value: Any) -> Any:
    """Control and bidirectional characters as their escapes, in everything that comes from outside."""
    return escape_control(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def prose(text: str) -> Markup:
    """A sentence of ours as HTML: escaped, with `literals` set as code."""
    marked = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(_visible(text))))
    return Markup(marked)


def _policy(*, scripts: Sequence[str], style: str) -> str:
    allowed = " ".join(_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(figures: Sequence[Figure]) -> str:
    """Every chart as JSON that HTML cannot end: rows as columns, and parts that several charts share once."""
    specs: dict[bytes, Any] = {}
    drawn = {figure.id: [_entry(chart, specs) for chart in figure.charts] for figure in figures}
    text = json.dumps(shared.pack(drawn), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _entry(chart: Chart, specs: dict[bytes, Any]) -> dict[str, Any]:
    """One chart; of equal specifications, which `specs` holds by their JSON, the same object."""
    spec = {key: value for key, value in chart.spec.items() if key != "params"}
    name, titles = chart.table
    return {
        "label": escape_control(chart.label),
        "note": escape_control(chart.note),
        "spec": specs.setdefault(orjson.dumps(spec), spec),
        "params": chart.spec.get("params", []),
        "data": {name: _columns(rows) for name, rows in chart.data.items()},
        "table": [name, dict(titles)],
    }


def _columns(rows: Rows) -> dict[str, Any]:
    """Rows as columns; texts as numbers into a list of the different ones, because they repeat."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            texts = [None if value is None else str(value) for value in values]
            place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
            known = [None if text is None else escape_control(text) for text in place]
            columns[name] = {"of": known, "at": [place[text] for text in texts]}
        else:
            columns[name] = values
    return columns


def _closed(script: str) -> str:
    """A script that HTML cannot end early.

    Raises:
        ValueError: it holds an end tag or a comment's begin: then its digest would not be that of what runs.
    """
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError("the script holds what HTML would take for its end")
    return script
