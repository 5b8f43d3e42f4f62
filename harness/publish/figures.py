"""Static figures of stored runs, as SVG or PNG: the charts of the report for papers and Markdown.

Drawn by vl-convert, which needs no browser. The same records give the same bytes.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import InputError
from harness.files import write_atomic
from harness.publish.report import charts, raw_charts, samples, shown
from harness.publish.report.drawing import LIGHT, Chart
from harness.publish.report.samples import Budget, Sample
from harness.publish.report.shown import Shown
from harness.strict import suggest

_FONT = "'Liberation Sans', Arial, Helvetica, sans-serif"
_PNG_SCALE = 2.0


class Wanted(NamedTuple):
    """What a figure is to show: runs, the level of a timeline (`LAUNCH/LEVEL`, default: the highest), its width."""

    shown: Sequence[Shown]
    level: str | None = None
    width: int = 640


def write_figure(
    runs: Sequence[Path], path: Path, kind: str = "throughput", *, level: str | None = None, width: int = 640
) -> None:
    """Write one chart of some runs or published tables.

    Args:
        runs: run folders, or reference files.
        path: where to; `.svg` or `.png`.
        kind: one of `KINDS`.
        level: of a timeline, `LAUNCH/LEVEL` such as `01-baseline/c4`; default: the last one measured.
        width: of the figure in CSS pixels; a PNG has twice as many.

    Raises:
        InputError: no such kind, format or level, or the runs have nothing of that kind to show.
    """
    if path.suffix not in {".svg", ".png"}:
        raise InputError(f"a figure is an .svg or a .png file, got `{path}`", hint="name one with `-o`")
    spec = figure(Wanted(shown.read_all(runs), level, width), kind)
    write_atomic(path, _svg(spec) if path.suffix == ".svg" else _png(spec))


def figure(wanted: Wanted, kind: str) -> dict[str, Any]:
    """One chart as a whole Vega-Lite specification with fixed colours and width.

    Raises:
        InputError: no such kind or level, or nothing of that kind to show.
    """
    if kind not in KINDS:
        raise InputError(f"there is no figure `{kind}`", hint=suggest(kind, KINDS))
    chart = KINDS[kind](wanted)
    if chart is None:
        names = ", ".join(f"`{one.name}`" for one in wanted.shown)
        raise InputError(f"{names}: nothing to draw as `{kind}`", hint=_WHY.get(kind, "no level was measured (yet)"))
    spec = chart.whole()
    config = {**spec["config"], "font": _FONT, "background": LIGHT.paper}
    label = _label(wanted.shown)
    title = {"title": {"text": label, "anchor": "end", "fontSize": 11, "fontWeight": 400, "color": LIGHT.muted}}
    return {**spec, "width": wanted.width, "config": config, **(title if label else {})}


def _label(shown: Sequence[Shown]) -> str:
    """What a reader must not miss about where numbers come from."""
    words = ["simulated"] if any(one.simulated for one in shown) else []
    words += ["published, not measured here"] if any(one.published for one in shown) else []
    return "; ".join(words)


def _ratio(wanted: Wanted) -> Chart | None:
    found = [comparison for one in wanted.shown if one.answer for comparison in one.answer.comparisons]
    return charts.ratio(shown.between(wanted.shown) or found, shown.treatments(wanted.shown), LIGHT)


def _pareto(wanted: Wanted) -> Chart | None:
    return next(iter(charts.pareto(wanted.shown, LIGHT)), None)


def _distribution(metric: str) -> Callable[[Wanted], Chart | None]:
    def draw(wanted: Wanted) -> Chart | None:
        if len(wanted.shown) > 1:
            raise InputError("distributions are drawn of one run at a time", hint="name one run")
        [one] = wanted.shown
        taken = _samples(one, None)
        return raw_charts.distribution(taken, shown.named([one]), one.name, LIGHT, metric)

    return draw


def _timeline(wanted: Wanted) -> Chart | None:
    if len(wanted.shown) > 1:
        raise InputError("a timeline is drawn of one run at a time", hint="name one run")
    taken = _samples(wanted.shown[0], wanted.level)
    return raw_charts.timeline(taken[-1], LIGHT) if taken else None


def _samples(one: Shown, level: str | None) -> list[Sample]:
    """The raw data of a run's levels, or of one of them."""
    known = {f"{found.launch}/{found.cell.level.get('name', found.cell.key)}": found for found in one.levels()}
    if level is not None and level not in known:
        raise InputError(f"run `{one.name}` has no finished level `{level}`", hint=suggest(level, known))
    picked = list(known.values()) if level is None else [known[level]]
    run = one.run
    return [samples.take(run, found, Budget.of(1)) for found in picked] if run else []


def _svg(spec: dict[str, Any]) -> str:
    import vl_convert  # noqa: PLC0415 - a large library, which nothing else needs

    return _numbered_anew(vl_convert.vegalite_to_svg(spec))


def _numbered_anew(svg: str) -> str:
    """A drawing whose clip paths are counted from 1: the library counts on from what it drew before."""
    numbers: dict[str, int] = {}

    def anew(match: re.Match[str]) -> str:
        return f"{match[1]}{numbers.setdefault(match[2], len(numbers) + 1)}"

    return re.sub(r'(id="clip|url\(#clip)(\d+)', anew, svg)


def _png(spec: dict[str, Any]) -> bytes:
    import vl_convert  # noqa: PLC0415 - as above

    # On paper, not on nothing: where a mark is half transparent, the library gets its colour wrong otherwise.
    return vl_convert.vegalite_to_png({**spec, "background": LIGHT.paper}, scale=_PNG_SCALE)


KINDS: dict[str, Callable[[Wanted], Chart | None]] = {
    "throughput": lambda wanted: charts.throughput(wanted.shown, LIGHT),
    "rate": lambda wanted: charts.throughput(wanted.shown, LIGHT, open_loop=True),
    "ratio": _ratio,
    "pareto": _pareto,
    "acceptance": lambda wanted: charts.acceptance(wanted.shown, LIGHT),
    "ttft": _distribution("ttft_s"),
    "tpot": _distribution("tpot_s"),
    "gaps": _distribution("chunk_gap_s"),
    "timeline": _timeline,
}
_WHY = {
    "throughput": "no closed-loop level was measured (yet); for offered rates, draw `rate`",
    "rate": "no level with an offered rate was measured; for concurrencies, draw `throughput`",
    "ratio": "no comparison is stored; `harness compare` shows what can be compared",
    "acceptance": "no server said how many drafted tokens it accepted",
}
