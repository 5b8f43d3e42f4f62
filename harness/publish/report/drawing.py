"""What every chart is made of: colours by role, series told apart three ways, marks, axes and one look.

A specification says units on its axes; each series has a shape and a colour of its own, so that it is known without
colour. In every chart a hollow mark is a suspect level, and a pale one with a dashed bar is not resolved. Colours are
names that the page's style sheet fills, or fixed ones for a figure.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_HEIGHT = 230

Spec = dict[str, Any]
Rows = list[dict[str, Any]]


class Palette(NamedTuple):
    """Colours by role. The series are those of Okabe and Ito, told apart in any kind of colour blindness."""

    ink: str
    muted: str
    grid: str
    paper: str
    band: str
    bad: str
    pale: str
    series: tuple[str, ...]


PAGE = Palette(
    ink="var(--ink)",
    muted="var(--muted)",
    grid="var(--grid)",
    paper="var(--paper)",
    band="var(--band)",
    bad="var(--bad)",
    pale="var(--pale)",
    series=tuple(f"var(--series-{number})" for number in range(1, 8)),
)
LIGHT = Palette(
    ink="#1b1f24",
    muted="#5b6470",
    grid="#e3e6ea",
    paper="#ffffff",
    band="#eef1f4",
    bad="#b3261e",
    pale="#a8cbe8",
    series=("#0072b2", "#d55e00", "#009e73", "#a8518a", "#8a6d00", "#3a93c9", "#555555"),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing: its specification, the rows of its data sets by name, and the same in a table.

    `note` says how to read it and what was left out. `table` stands behind the drawing for those who do not see it: a
    data set's name, and the titles of its fields.
    """

    spec: Spec
    data: Mapping[str, Rows]
    note: str = ""
    label: str = ""
    table: tuple[str, Mapping[str, str]] = ("", {})

    def whole(self) -> Spec:
        """The specification with its data."""
        return {**self.spec, "datasets": dict(self.data)}


class Series(NamedTuple):
    """The arms of a chart; colour, shape and dash come from an arm's place among all, so that they stay its own."""

    every: tuple[str, ...]
    names: tuple[str, ...]
    palette: Palette

    @classmethod
    def of(cls, every: Iterable[str], rows: Rows, palette: Palette) -> "Series":
        """The arms that some rows are about."""
        used = {row["arm"] for row in rows}
        all_names = tuple(dict.fromkeys(every))
        return cls(all_names, tuple(name for name in all_names if name in used), palette)

    def scales(self, *, shape: bool = True) -> Spec:
        """Encodings of colour (and shape) by the field `arm`, with one legend."""
        colours = self.palette.series
        encodings = {"color": self._by(lambda place: colours[place % len(colours)])}
        if shape:
            encodings["shape"] = self._by(lambda place: _SHAPES[place % len(_SHAPES)])
        return encodings

    def dashes(self) -> Spec:
        """The encoding of a line's dash, needed only where colours repeat."""
        turn = len(self.palette.series)
        if len(self.every) <= turn:
            return {}
        return {"strokeDash": self._by(lambda place: _DASHES[place // turn % len(_DASHES)])}

    def _by(self, value_at: Callable[[int], Any]) -> Spec:
        longest = max((len(name) for name in self.names), default=0)
        columns = max(1, min(len(self.names), int(330 // (30 + 6.5 * min(longest, 40)))))
        shown = {"title": None, "orient": "top", "columns": columns, "labelLimit": 280, "symbolOpacity": 1}
        return {
            "field": "arm",
            "type": "nominal",
            "scale": {"domain": list(self.names), "range": [value_at(self.every.index(name)) for name in self.names]},
            "legend": shown,
        }


def marks(arms: Series, encoding: Spec, palette: Palette, solid: str, data: str = "rows", *, size: int = 64) -> Rows:
    """Marks by series: solid where a test holds, hollow elsewhere. `size` is their area in square pixels."""
    common = {"data": {"name": data}, "encoding": {**encoding, **arms.scales()}}
    hollow = {"type": "point", "filled": False, "fill": palette.paper, "size": size, "strokeWidth": 2, "opacity": 1}
    filled = {"type": "point", "filled": True, "size": size, "opacity": 1}
    return [
        {**common, "mark": hollow, "transform": [{"filter": f"!({solid})"}]},
        {**common, "mark": filled, "transform": [{"filter": solid}]},
    ]


def pale(settled: str, *, bars: bool = False) -> Spec:
    """The encoding of marks, or of interval bars, that are pale (and dashed) where a test does not hold."""
    encoding: Spec = {"opacity": {"condition": {"test": settled, "value": 1}, "value": 0.4}}
    if bars:
        encoding["strokeDash"] = {"condition": {"test": settled, "value": [1, 0]}, "value": [4, 3]}
    return encoding


def interval_bars(arms: Series, x: Spec, y: Spec, data: str = "rows", look: Spec | None = None) -> Spec:
    """Interval bars, from `low` to `high`, where there is an interval; `look` is more of their encoding."""
    return {
        "data": {"name": data},
        "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, **only_colour(arms), **(look or {})},
        "transform": [{"filter": "isValid(datum.low)"}],
    }


def only_colour(arms: Series) -> Spec:
    """The encoding of marks that have no shape: lines, bars, small dots."""
    return arms.scales(shape=False)


def ticks(low: float, high: float, steps: Sequence[float]) -> list[float]:
    """Round values of a logarithmic axis; where few decades leave no room for two, its ends instead."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [value for decade in decades for step in steps if low <= (value := digits(step * 10.0**decade)) <= high]
    return found if len(found) > 1 else [float(f"{low:.2g}"), *found, float(f"{high:.2g}")]


def tips(**titles: str) -> Spec:
    """The encoding of what a mark says when it is pointed at; fields in the order given."""
    return {"tooltip": [{"field": name, "title": title} for name, title in titles.items()]}


def digits(value: float) -> float:
    """Five significant digits: what a drawing can show."""
    return float(f"{value:.5g}")


def drawing(palette: Palette, layers: Sequence[Spec], description: str) -> Spec:
    """Layers as a whole specification, as wide as its place in a page."""
    return {
        "$schema": SCHEMA,
        "description": description,
        "width": "container",
        "height": _HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        "config": _config(palette),
        "layer": list(layers),
    }


def _config(palette: Palette) -> Spec:
    text = {"labelColor": palette.muted, "titleColor": palette.ink, "labelFontSize": 12, "titleFontSize": 12,
            "titleFontWeight": 500, "labelFontWeight": 400}  # fmt: skip
    return {
        "aria": False,  # a drawing is one image to a screen reader; the table behind it has the numbers
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "domainColor": palette.muted, "tickColor": palette.muted, "gridColor": palette.grid,
                 "titlePadding": 8, "labelPadding": 4},
        "axisY": {"domain": False, "ticks": False},
        "legend": {**text, "labelColor": palette.ink, "symbolSize": 70, "rowPadding": 3, "columnPadding": 14,
                   "offset": 8},
        "scale": {"bandPaddingInner": 0.2},
    }  # fmt: skip
