"""Charts of raw requests: how the times of a level are distributed, and what happened when."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.publish.report.drawing import Chart, Palette, Rows, Series, Spec, digits, drawing, ticks, tips
from harness.publish.report.samples import DISTRIBUTIONS, Sample, Values, spread
from harness.publish.report.shown import Level
from harness.stats.arms import order
from harness.stats.percentiles import supports

_LEAST_GAP_MS = 0.05  # a logarithmic axis has no zero; chunks of one read share a stamp
_TALLEST = 560
_LEVELS = {"title": "level", "labelAngle": 0, "labelOverlap": "greedy", "grid": False}
TIMELINE = (
    "Pale: waiting for the first token; full: generating; grey background: the steady window. Triangles on top: lines"
    " that the server or the harness wrote, warnings and errors in red."
)
_STATES = ("waiting for the first token", "generating", "warm-up", "failed")
_ONE_TWO_FIVE = (1.0, 2.0, 5.0)


def distribution(
    samples: Sequence[Sample], names: Mapping[tuple[str, str], str], run: str, palette: Palette, metric: str
) -> Chart | None:
    """One time of requests at every level: points of the sample, and its median where there are enough for one."""
    pooled = _pooled(samples, metric)
    if not pooled:
        return None
    dots: Rows = []
    rows: Rows = []
    for (arm, _), found in pooled.items():
        common = {"arm": names[run, arm], "level": found.level.label}
        dots += [{**common, "ms": digits(max(value * 1e3, _LEAST_GAP_MS))} for value in found.drawn()]
        rows.append({**common, **found.summary()})
    arms = Series.of(names.values(), rows, palette)
    levels = list(dict.fromkeys(pool.level.label for pool in _by_load(pooled.values())))
    domain = (min(row["ms"] for row in dots) / 1.2, max(row["ms"] for row in dots) * 1.2)
    x = {"field": "level", "type": "ordinal", "sort": levels, "axis": _LEVELS}
    y = {
        "type": "quantitative",
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {
            "title": DISTRIBUTIONS[metric],
            "values": ticks(*domain, _ONE_TWO_FIVE),
            "format": "~r",
            "labelOverlap": "greedy",
        },
    }
    offset = {"xOffset": {"field": "arm", "type": "nominal", "sort": list(arms.names)}}
    said = tips(arm="arm", level="level", n="values", median="median (ms)")
    layers: Rows = [
        {
            "data": {"name": "dots"},
            "mark": {"type": "point", "filled": True, "opacity": 0.45, "size": 18},
            "encoding": {"x": x, "y": {**y, "field": "ms"}, **offset, **arms.scales()},
        },
        {
            "data": {"name": "rows"},
            "transform": [{"filter": "isValid(datum.median)"}],
            "mark": {"type": "point", "shape": "stroke", "size": 220, "strokeWidth": 2.5, "color": palette.ink},
            "encoding": {"x": x, "y": {**y, "field": "median"}, **offset, **said},
        },
    ]
    note = f"Dots are requests, bars medians ({_left_out(pooled.values())})."
    if metric == "chunk_gap_s":
        note = (
            f"{note.replace('requests', 'gaps', 1)} Gaps under {_LEAST_GAP_MS:g} ms are drawn at {_LEAST_GAP_MS:g} ms."
        )
    table = {"arm": "arm", "level": "level", "n": "values", "least": "smallest (ms)", "median": "median (ms)",
             "most": "largest (ms)"}  # fmt: skip
    spec = drawing(palette, layers, f"{DISTRIBUTIONS[metric]} by level")
    return Chart(spec, {"dots": dots, "rows": rows}, note, table=("rows", table))


def timeline(sample: Sample, palette: Palette) -> Chart:
    """One level as it went: a bar a request, by slot, with what server and harness wrote meanwhile."""
    found = sample.timeline
    lanes = {lane: place + 1 for place, lane in enumerate(sorted({bar.lane for bar in found.bars}))}
    bars = [_bar_row(bar._asdict(), lanes[bar.lane]) for bar in found.bars]
    last = max([row["end"] for row in bars] + [line.at_s for line in found.lines], default=1.0) or 1.0
    x = {
        "type": "quantitative",
        "scale": {"domain": [0, {"expr": "last"}], "nice": False},
        "axis": {"title": "seconds since the level began"},
    }
    row_height = max(3, min(16, _TALLEST // max(1, len(lanes))))
    lane = {
        "field": "lane",
        "type": "ordinal",
        "scale": {"paddingInner": 0.25, "paddingOuter": 0.5},
        "axis": {"title": "slot", "labels": row_height >= 9, "ticks": False, "grid": False},
    }
    window = [] if found.window is None else [{"from": found.window[0], "to": found.window[1]}]
    lines = [{"at": digits(line.at_s), "kind": line.kind, "text": line.text} for line in found.lines]
    layers = [_window_layer(x, palette), *_request_layers(x, lane, palette), *_log_layers(x, palette)]
    spec = drawing(palette, layers, "Requests of one level over time")
    spec["params"] = [{"name": "last", "value": last}]  # apart, so that the rest is the same for every level
    spec["height"] = row_height * max(1, len(lanes)) + 8
    return Chart(
        spec,
        {"bars": bars, "window": window, "lines": lines},
        _timeline_note(sample, len(bars)),
        label=f"{sample.level.launch}, {sample.level.label}",
        table=("lines", {"at": "second", "kind": "written by", "text": "line"}),
    )


@dataclass(slots=True)
class _Pool:
    """One level of one arm over its launches; `most` is how many of its values may be drawn."""

    level: Level
    values: Values
    most: int

    def drawn(self) -> list[float]:
        return spread(self.values, self.most)

    def summary(self) -> dict[str, float | None]:
        milliseconds = self.values * 1e3
        median = digits(float(np.median(milliseconds))) if supports(len(self.values), 0.5) else None
        least, most = digits(float(milliseconds.min())), digits(float(milliseconds.max()))
        return {"n": len(self.values), "least": least, "median": median, "most": most}


def _pooled(samples: Sequence[Sample], metric: str) -> dict[tuple[str, str], _Pool]:
    found: dict[tuple[str, str], _Pool] = {}
    for sample in samples:
        values = sample.values.get(metric)
        if values is not None and len(values):
            pool = found.setdefault(
                (sample.level.arm, sample.level.cell.key), _Pool(sample.level, values[:0], sample.dots)
            )
            pool.values = np.concatenate([pool.values, values])
    return found


def _by_load(pools: Iterable[_Pool]) -> list[_Pool]:
    return sorted(pools, key=lambda pool: order(pool.level.cell.level))


def _left_out(pools: Iterable[_Pool]) -> str:
    cut = [pool.most for pool in pools if len(pool.values) > pool.most]
    if not cut:
        return "every value is drawn; launches of an arm are pooled"
    most = max(cut)
    return f"at most {most} a level and arm, evenly spaced by rank, smallest and largest included; launches are pooled"


def _bar_row(bar: Mapping[str, Any], lane: int) -> dict[str, Any]:
    first = bar["first_s"]
    return {
        "lane": lane,
        "sent": digits(bar["sent_s"]),
        "first": digits(bar["end_s"] if first is None else first),
        "end": digits(bar["end_s"]),
        "state": bar["state"],
        "tokens": bar["tokens"],
        "note": bar["note"],
    }


def _window_layer(x: Spec, palette: Palette) -> Spec:
    return {
        "data": {"name": "window"},
        "mark": {"type": "rect", "color": palette.band},
        "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}},
    }


def _request_layers(x: Spec, lane: Spec, palette: Palette) -> Rows:
    """Each request in two parts: until its first token, and from there on."""
    shades = [palette.pale, palette.series[0], palette.muted, palette.bad]
    colour = {
        "field": "part",
        "type": "nominal",
        "scale": {"domain": list(_STATES), "range": shades},
        "legend": {"title": None, "orient": "top", "columns": 2},
    }
    said = tips(sent="sent (s)", first="first token (s)", end="end (s)", tokens="tokens", state="state", note="why")
    layers: Rows = []
    for start, end, going_on in (("sent", "first", _STATES[0]), ("first", "end", _STATES[1])):
        place = {"x": {**x, "field": start}, "x2": {"field": end}, "y": lane}
        layer: Spec = {
            "data": {"name": "bars"},
            "transform": [{"calculate": f"datum.state === 'ok' ? '{going_on}' : datum.state", "as": "part"}],
            "mark": {"type": "bar", "height": {"band": 1}},
            "encoding": {**place, "color": colour, **said},
        }
        layers.append(layer)
    return layers


def _log_layers(x: Spec, palette: Palette) -> Rows:
    """A triangle on top for each line that was written; warnings and errors in red, with a rule across."""
    loud = "datum.kind === 'warning' || datum.kind === 'error'"
    mark = {"type": "point", "shape": "triangle-down", "filled": True, "size": 40, "opacity": 1}
    at = {"x": {**x, "field": "at"}}
    written = {**at, "y": {"value": 0}, **tips(at="second", kind="written by", text="line")}
    rule: Spec = {
        "data": {"name": "lines"},
        "transform": [{"filter": loud}],
        "mark": {"type": "rule", "strokeWidth": 1, "strokeDash": [3, 3], "color": palette.bad},
        "encoding": at,
    }
    layers = [rule]
    for test, shade in ((f"!({loud})", palette.muted), (loud, palette.bad)):
        layer: Spec = {"data": {"name": "lines"}, "transform": [{"filter": test}], "encoding": written}
        layers.append({**layer, "mark": {**mark, "color": shade}})
    return layers


def _timeline_note(sample: Sample, drawn: int) -> str:
    found = sample.timeline
    parts = []
    if drawn < found.requests:
        parts.append(
            f"{drawn} of {found.requests} requests are drawn, on slots at even distances ({found.lanes} in all)."
        )
    if len(found.lines) < found.written:
        parts.append(f"{len(found.lines)} of {found.written} lines are drawn, warnings and errors first.")
    return " ".join(parts)
