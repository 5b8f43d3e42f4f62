"""Charts of levels, as Vega-Lite specifications: the same one is drawn in a page and written as a static figure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.publish.report.drawing import (
    Chart,
    Palette,
    Rows,
    Series,
    Spec,
    digits,
    drawing,
    interval_bars,
    marks,
    only_colour,
    pale,
    ticks,
    tips,
)
from harness.publish.report.shown import Level, Shown, named
from harness.stats.arms import PRIMARY, order
from harness.stats.comparison import Comparison, Estimate, Row
from harness.stats.intervals import interval, paired

PARETO = "Numbers beside marks are concurrent requests."
LATENCIES = {
    "tpot_s": ("TPOT", "time per output token (ms)", 1e3, "ms"),
    "ttft_s": ("TTFT", "time to first token (ms)", 1e3, "ms"),
    "e2e_s": ("E2E", "end to end (s)", 1.0, "s"),
    "user": ("speed of one stream", "tokens / s of one stream (1 / TPOT)", 1.0, "tok/s"),
}
_RATIOS = (1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
_HEADROOM = 0.08  # of an axis, beyond its outermost mark: half a mark and the number above it
_ONE: dict[str, Any] = {"values": [{}]}  # a mark that stands for no datum is drawn once


def throughput(shown: Sequence[Shown], palette: Palette, *, open_loop: bool = False) -> Chart | None:
    """Output tokens a second over what is offered, each arm's mean over launches with its 95 % interval."""
    return _over_load(
        shown,
        palette,
        lambda level: level.cell.values.get(PRIMARY),
        _Axis("output tokens / s", "tok/s", origin=0.0),
        open_loop=open_loop,
    )


def acceptance(shown: Sequence[Shown], palette: Palette) -> Chart | None:
    """Tokens a verify step yields over concurrency, for arms that speculate."""
    axis = _Axis("tokens per verify step", "tokens per step", origin=1.0)
    return _over_load(shown, palette, lambda level: level.acceptance, axis)


def pareto(shown: Sequence[Shown], palette: Palette) -> list[Chart]:
    """Latency over throughput, a chart for each latency; the levels of an arm are joined in the order of load."""
    charts = [_pareto(shown, palette, metric) for metric in LATENCIES]
    return [chart for chart in charts if chart is not None]


def ratio(comparisons: Sequence[Comparison], names: Mapping[str, str], palette: Palette) -> Chart | None:
    """Treatment over base by level, with the interval of the ratio and the margin within which nothing is different.

    Args:
        comparisons: any, of one margin.
        names: of all arms, by what comparisons call them, in the order in which other charts colour them.
        palette: the colours.
    """
    found = [
        _ratio_row(names.get(one.treatment, one.treatment), row, row.estimate)
        for one in comparisons
        for row in one.rows
        if row.estimate and row.verdict != "not comparable"
    ]
    rows = [row for row in found if row["at"] is not None]
    if not rows:
        return None
    arms = Series.of([*names.values(), *(row["arm"] for row in rows)], rows, palette)
    margin = comparisons[0].margin
    domain = _ratio_domain(rows, margin)
    y = {"type": "quantitative", "scale": {"type": "log", "domain": domain, "nice": False}}
    axis = {
        "title": "throughput, treatment / base",
        "values": ticks(*domain, _RATIOS),
        "format": "~r",
        "labelOverlap": "greedy",
    }
    said = tips(
        arm="treatment", label="level", ratio="ratio", low="low", high="high", verdict="verdict", state="level is"
    )
    band = {"y": {"datum": 1 - margin, **y}, "y2": {"datum": 1 + margin}}
    x = _load_axis(rows)
    layers = [
        {"data": _ONE, "mark": {"type": "rect", "color": palette.band}, "encoding": band},
        {"data": _ONE, "mark": {"type": "rule", "color": palette.muted}, "encoding": {"y": {"datum": 1, **y}}},
        interval_bars(arms, x, {**y, "axis": axis}, look=pale("datum.settled", bars=True)),
        *marks(
            arms,
            {"x": x, "y": {**y, "field": "ratio", "axis": axis}, **pale("datum.settled"), **said},
            palette,
            "datum.state === 'valid'",
        ),
    ]
    note = f"Above 1 the treatment is faster. The grey band is ±{margin:.0%}, within which a difference does not count."
    if not all(row["settled"] for row in rows):
        note += " A pale mark, with a dashed bar where it has one, is a level that is not resolved."
    note += _hollow(rows)
    if any(row["low"] is None for row in rows):
        note += " A mark without a bar has no interval: one launch an arm allows none."
    table = {
        "arm": "treatment",
        "label": "level",
        "ratio": "ratio",
        "low": "95 % from",
        "high": "to",
        "verdict": "verdict",
        "state": "level is",
    }
    return Chart(drawing(palette, layers, "Ratio of throughput by level"), {"rows": rows}, note, table=("rows", table))


def course(shown: Sequence[Shown], palette: Palette) -> list[Chart]:
    """Throughput run by run in the order given, a chart for each level that at least two runs have."""
    arms = tuple(dict.fromkeys(level.arm for one in shown for level in one.levels()))
    keyed: dict[str, Rows] = {}
    levels: dict[str, Level] = {}
    for number, one in enumerate(shown, start=1):
        for (arm, key), cells in _grouped([one], {(one.name, arm): arm for arm in one.arms}).items():
            values = [level.cell.values[PRIMARY] for level in cells if PRIMARY in level.cell.values]
            if values:
                levels[key] = cells[0]
                row = {"number": number, "run": one.name, "arm": arm, "tok": digits(_mean(values))}
                keyed.setdefault(key, []).append({**row, "state": _worst(cells)})
    shared = [key for key, rows in keyed.items() if len({row["run"] for row in rows}) > 1]
    shared.sort(key=lambda key: order(levels[key].cell.level))
    return [_course(keyed[key], levels[key].label, Series.of(arms, keyed[key], palette)) for key in shared]


class _Axis(NamedTuple):
    """A value axis: its title, the unit as a table's head names it, and where it begins."""

    title: str
    unit: str
    origin: float


def _over_load(
    shown: Sequence[Shown],
    palette: Palette,
    value_of: Callable[[Level], float | None],
    axis: _Axis,
    *,
    open_loop: bool = False,
) -> Chart | None:
    names = named(shown)
    means: Rows = []
    dots: Rows = []
    for (arm, _), levels in _grouped(shown, names, open_loop=open_loop).items():
        known = [(level, value) for level in levels if (value := value_of(level)) is not None]
        if known:
            means.append(_mean_row(arm, known))
            dots += [
                {"arm": arm, "at": means[-1]["at"], "value": digits(value), "launch": level.launch}
                for level, value in known
                if len(known) > 1
            ]
    if not means:
        return None
    arms = Series.of(names.values(), means, palette)
    x = _load_axis(means, "offered load (requests / s)" if open_loop else "concurrent requests")
    y = {
        "field": "value",
        "type": "quantitative",
        "scale": _domain(means, axis.origin),
        "axis": {"title": axis.title, "tickCount": 6},
    }
    said = tips(arm="arm", label="level", value=axis.unit, low="low", high="high", launches="launches", state="verdict")
    line = {"x": x, "y": y, "order": {"field": "at", "type": "quantitative"}}
    layers: Rows = [
        interval_bars(arms, x, y, "means"),
        {
            "data": {"name": "means"},
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {**line, **only_colour(arms), **arms.dashes()},
        },
        {
            "data": {"name": "dots"},
            "mark": {"type": "point", "filled": True, "opacity": 0.45, "size": 14, "shape": "circle"},
            "encoding": {"x": x, "y": y, **only_colour(arms), **tips(arm="arm", launch="launch", value=axis.unit)},
        },
        *marks(arms, {"x": x, "y": y, **said}, palette, "datum.state === 'valid'", "means"),
    ]
    return Chart(
        drawing(palette, layers, f"{axis.title} by level"),
        {"means": means, "dots": dots},
        _over_load_note(means),
        table=("means", {"arm": "arm", "label": "level", "value": axis.unit, "low": "95 % from", "high": "to",
                         "launches": "launches", "state": "verdict"}),
    )  # fmt: skip


def _mean_row(arm: str, known: Sequence[tuple[Level, float]]) -> dict[str, Any]:
    """The geometric mean over launches, with Student's interval on the log scale where there are two or more."""
    values = [value for _, value in known]
    level = known[0][0]
    bounds = None
    if len(values) > 1 and min(values) > 0:
        found = interval(paired(np.log(values)))
        bounds = found.exp() if found else None
    return {
        "arm": arm,
        "label": level.label,
        "at": _load(level),
        "value": digits(_mean(values)),
        "low": digits(bounds.low) if bounds else None,
        "high": digits(bounds.high) if bounds else None,
        "launches": len(values),
        "state": _worst([level for level, _ in known]),
    }


def _over_load_note(means: Rows) -> str:
    several = [row for row in means if row["launches"] > 1]
    if not several:
        return "One launch an arm: a point is one launch, and no interval is possible." + _hollow(means)
    note = "Marks are means over launches, bars their 95 % intervals (Student's t), small dots single launches."
    return note + _hollow(means)


def _hollow(rows: Rows) -> str:
    return "" if all(row["state"] == "valid" for row in rows) else " Hollow marks are suspect levels."


def _pareto(shown: Sequence[Shown], palette: Palette, metric: str) -> Chart | None:
    names = named(shown)
    short, title, factor, unit = LATENCIES[metric]
    rows: Rows = []
    for (arm, _), levels in _grouped(shown, names).items():
        pairs = [(value, latency) for level in levels if (latency := _latency(level, metric))
                 and (value := level.cell.values.get(PRIMARY))]  # fmt: skip
        if pairs:
            speed, latency = _mean([value for value, _ in pairs]), _mean([latency for _, latency in pairs])
            level = levels[0]
            rows.append({"arm": arm, "label": level.label, "at": _load(level), "tok": digits(speed),
                         "value": digits(latency * factor), "state": _worst(levels)})  # fmt: skip
    if not rows:
        return None
    arms = Series.of(names.values(), rows, palette)
    x = {
        "field": "tok",
        "type": "quantitative",
        "scale": _up_to("most_x"),
        "axis": {"title": "output tokens / s", "tickCount": 6},
    }
    y = {
        "field": "value",
        "type": "quantitative",
        "scale": _up_to("most_y"),
        "axis": {"title": title, "tickCount": 6},
    }
    said = tips(arm="arm", label="level", tok="tok/s", value=f"{short} ({unit})", state="verdict")
    place = {"data": {"name": "rows"}, "encoding": {"x": x, "y": y}}
    tops = {"most_x": max(row["tok"] for row in rows), "most_y": max(row["value"] for row in rows)}
    layers: Rows = [
        {
            **place,
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "order": {"field": "at", "type": "quantitative"}, **only_colour(arms),
                         **arms.dashes()},
        },
        *marks(arms, {"x": x, "y": y, **said}, palette, "datum.state === 'valid'"),
        {
            **place,
            "mark": {"type": "text", "dy": -11, "fontSize": 11, "color": palette.muted},
            "encoding": {"x": x, "y": y, "text": {"field": "at", "type": "quantitative"}},
        },
    ]  # fmt: skip
    better = "up" if metric == "user" else "down"
    note = f"Better is to the right and {better}. {short}: {_typical(metric)}." + _hollow(rows)
    table = {"arm": "arm", "label": "level", "tok": "tok/s", "value": f"{short} ({unit})", "state": "verdict"}
    spec = drawing(palette, layers, f"{title} over throughput")
    spec["params"] = [{"name": name, "value": value} for name, value in tops.items()]
    return Chart(spec, {"rows": rows}, note, label=short, table=("rows", table))


def _typical(metric: str) -> str:
    return "median over requests, or mean where few requests allow none" if metric != "user" else "1 / typical TPOT"


def _latency(level: Level, metric: str) -> float | None:
    if metric != "user":
        return level.cell.values.get(metric)
    tpot = level.cell.values.get("tpot_s")
    return 1 / tpot if tpot else None


def _ratio_row(arm: str, row: Row, estimate: Estimate) -> dict[str, Any]:
    bounds = estimate.interval
    return {
        "arm": arm,
        "label": row.key if row.concurrency is None else f"C={row.concurrency}",
        "at": None if row.level.get("mode") == "serial" else row.concurrency,
        "ratio": digits(estimate.ratio),
        "low": digits(bounds.low) if bounds else None,
        "high": digits(bounds.high) if bounds else None,
        "launches": estimate.launches,
        "verdict": row.verdict,
        "state": "suspect" if row.suspect else "valid",
        "settled": row.verdict in {"better", "worse", "equivalent"},
    }


def _load_axis(rows: Rows, title: str = "concurrent requests") -> Spec:
    """The axis of offered load: logarithmic, with a tick at every level that was measured."""
    levels = sorted({row["at"] for row in rows})
    return {
        "field": "at",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "domain": [levels[0] / 1.25, levels[-1] * 1.25], "nice": False},
        "axis": {"title": title, "values": levels, "format": "~r", "labelOverlap": "greedy", "grid": False},
    }


def _ratio_domain(rows: Rows, margin: float) -> tuple[float, float]:
    """The axis of ratios, with room beyond the outermost mark; intervals are cut off below 0.2 and above 5."""
    marked = [row["ratio"] for row in rows]
    ends = [*marked, *(value for row in rows for value in (row["low"], row["high"]) if value is not None)]
    low = min(*marked, max(0.2, min(*ends, 1 - 2 * margin)))
    high = max(*marked, min(5.0, max(*ends, 1 + 2 * margin)))
    room = (high / low) ** _HEADROOM
    return low / room, high * room


def _domain(means: Rows, origin: float) -> Spec:
    """From the origin; an interval may widen the axis to half as much again, and is cut off beyond."""
    high = max(row["value"] for row in means)
    above = max([high, *(row["high"] for row in means if row["high"] is not None)])
    top = min(above, high + (high - origin) / 2)
    return {"domain": [origin, max(origin + 1e-3, top + (top - origin) * _HEADROOM)], "nice": True}


def _up_to(parameter: str) -> Spec:
    """From zero to a parameter of the specification, whose other parts are then the same in every run."""
    return {"domain": [0, {"expr": f"{1 + _HEADROOM} * {parameter}"}], "nice": True}


def _from_zero(rows: Rows, field: str) -> Spec:
    return {"domain": [0, (1 + _HEADROOM) * max(row[field] for row in rows) or 1], "nice": True}


def _course(rows: Rows, label: str, arms: Series) -> Chart:
    last = max(row["number"] for row in rows)
    x = {
        "field": "number",
        "type": "quantitative",
        "scale": {"domain": [0.5, last + 0.5], "nice": False},
        "axis": {
            "title": "run, in the order given",
            "values": list(range(1, last + 1, 1 + last // 25)),
            "format": "d",
            "labelOverlap": "greedy",
            "grid": False,
        },
    }
    y = {
        "field": "tok",
        "type": "quantitative",
        "scale": _from_zero(rows, "tok"),
        "axis": {"title": "output tokens / s", "tickCount": 6},
    }
    titles = {"run": "run", "arm": "arm", "tok": "tok/s", "state": "verdict"}
    said = tips(**titles)
    line = {
        "data": {"name": "rows"},
        "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.6},
        "encoding": {"x": x, "y": y, **only_colour(arms)},
    }
    drawn = marks(
        arms, {"x": x, "y": y, **said}, arms.palette, "datum.state === 'valid'", size=64 if last <= 30 else 24
    )
    layers = [line, *drawn]
    note = "Each mark is one run's mean over its launches." + _hollow(rows)
    return Chart(
        drawing(arms.palette, layers, f"Throughput by run at {label}"), {"rows": rows}, note, label, ("rows", titles)
    )


def _grouped(
    shown: Sequence[Shown], names: Mapping[tuple[str, str], str], *, open_loop: bool = False
) -> dict[tuple[str, str], list[Level]]:
    """Usable levels with a load, by arm and level, in the order of load."""
    found: dict[tuple[str, str], list[Level]] = {}
    for one in shown:
        for level in one.levels():
            mode = level.cell.level.get("mode")
            if level.cell.usable and mode == ("open" if open_loop else "closed"):
                found.setdefault((names[one.name, level.arm], level.cell.key), []).append(level)
    return dict(sorted(found.items(), key=lambda item: order(item[1][0].cell.level)))


def _load(level: Level) -> float:
    offered = level.cell.level.get("concurrency") or level.cell.level.get("rate")
    return float(offered or 1)


def _worst(levels: Iterable[Level]) -> str:
    return "valid" if all(level.cell.state == "valid" for level in levels) else "suspect"


def _mean(values: Sequence[float]) -> float:
    """The geometric mean, as comparisons take it; with a zero among the values there is only the arithmetic one."""
    if min(values) > 0:
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)
