"""Verbs: show, compare. They read stored runs, also ones that still go on or were killed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Verbs, common, safe
from harness.errors import AnswerIsNo, InputError, MeasurementError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.run.answer import Answer
    from harness.run.store import Run
    from harness.stats.comparison import Comparison


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    show = common(verbs.add_parser("show", help="what a run measured; works while it goes on and after a kill"))
    show.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: the newest)")
    show.set_defaults(run=show_runs)
    compare = common(
        verbs.add_parser("compare", help="compare arms of a run, runs with each other, or published tables")
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="one run with several arms, or base and new")
    compare.add_argument("--base", help="the arm that others are compared against (default: the recipe's)")
    compare.add_argument(
        "--arms",
        action="append",
        default=[],
        type=_pair,
        metavar="A:B",
        help="compare arm A of the first run with arm B of the others; repeatable (default: all that share a name)",
    )
    compare.add_argument("--margin", type=_share, help="a ratio this near 1 is no difference (default: 0.02)")
    compare.add_argument(
        "--treatment",
        action="append",
        default=[],
        metavar="PATTERN",
        help="what may differ, such as `server.args.speculative-*`; repeatable (default: the recipe's)",
    )
    compare.set_defaults(run=compare_runs)


def _share(text: str) -> float:
    """A number between 0 and 1, both left out."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not between 0 and 1")
    return value


def _pair(text: str) -> tuple[str, str]:
    """Two names of arms with a colon between; one name stands for both."""
    one, colon, other = text.partition(":")
    if not one or (colon and not other):
        raise argparse.ArgumentTypeError(f"`{text}` is not of the form `ARM` or `ARM:ARM`")
    return one, other or one


def show_runs(arguments: argparse.Namespace) -> int:
    """`harness show`."""
    from rich.console import Group

    from harness.run import store

    paths = arguments.runs or [newest()]
    runs = [store.open_run(path) for path in paths]
    data = [run_data(run) for run in runs]
    arguments.talk.data(data if len(data) > 1 else data[0], Group(*(run_view(run) for run in runs)))
    return 0


def compare_runs(arguments: argparse.Namespace) -> int:
    """`harness compare`. Exit 1 when a treatment is worse at a level, else 6 when a level could not be compared."""
    from rich.console import Group
    from rich.text import Text

    from harness.recipe import references
    from harness.run import answer, store

    published = [references.is_reference(path) for path in arguments.runs]
    if all(published):
        return _compare_published(arguments)
    if any(published):
        return _compare_with_published(arguments, published)
    runs = [store.open_run(path) for path in arguments.runs]
    asked = answer.Asked(arguments.base, arguments.margin, arguments.treatment, arguments.arms)
    found = answer.across(runs, asked)
    suspect = _distrust(runs)
    shown = Group(*answer_view(found), *(Text(safe(f"suspect: {line}")) for line in suspect))
    arguments.talk.data({**found.model_dump(mode="json"), "suspect": suspect}, shown)
    return _code(found.comparisons)


def _code(comparisons: "Sequence[Comparison]") -> int:
    """1 for a treatment that is worse anywhere, 6 where a level was not comparable, 0 else."""
    verdicts = {row.verdict for comparison in comparisons for row in comparison.rows}
    if "worse" in verdicts:
        return AnswerIsNo.exit_code
    return MeasurementError.exit_code if "not comparable" in verdicts else 0


def _compare_with_published(arguments: argparse.Namespace, published: "Sequence[bool]") -> int:
    """Runs against published tables, either way round: by whole-run throughput, which is all that a table tells."""
    from rich.console import Group
    from rich.text import Text

    from harness.recipe import references
    from harness.run import answer, store

    sides = [
        references.load(path) if is_table else store.open_run(path)
        for path, is_table in zip(arguments.runs, published, strict=True)
    ]
    asked = answer.Asked(arguments.base, arguments.margin, arguments.treatment, arguments.arms)
    comparisons, notes = answer.with_published(sides, asked)
    suspect = _distrust([side for side in sides if isinstance(side, store.Run)])
    data = {
        "comparisons": [comparison.model_dump(mode="json") for comparison in comparisons],
        "notes": notes,
        "suspect": suspect,
    }
    lines = [*notes, *(f"suspect: {line}" for line in suspect)]
    arguments.talk.data(data, Group(*comparisons_view(comparisons), *(Text(safe(line)) for line in lines)))
    return _code(comparisons)


def _distrust(runs: "Sequence[Run]") -> list[str]:
    """Why one might distrust a comparison of these runs: what their machine facts say, which no comparison stores."""
    from harness.run.facts import busy_before

    found = {run.path: (run.run_id, busy_before(run.facts())) for run in runs}
    return [f"{run_id}: {line}" if len(found) > 1 else line for run_id, lines in found.values() for line in lines]


def _compare_published(arguments: argparse.Namespace) -> int:
    """Published tables against the first of them; what other methods said of the same servers stands below."""
    from rich.console import Group
    from rich.text import Text

    from harness.recipe.references import compare_published
    from harness.stats.compare import Settings

    found = compare_published(arguments.runs, Settings(margin=arguments.margin or Settings().margin))
    data = {
        "comparisons": [comparison.model_dump(mode="json") for comparison in found.comparisons],
        "serial": [check.model_dump(mode="json") for check in found.serial],
    }
    findings = [Text(check.message) for check in found.serial]
    arguments.talk.data(data, Group(*comparisons_view(found.comparisons), *findings))
    return _code(found.comparisons)


def run_data(run: "Run") -> dict[str, Any]:
    """A run as JSON: state, levels, answer."""
    from harness.run import answer
    from harness.run.facts import busy_before

    found = answer.stored(run)
    return {
        "run": run.run_id,
        "path": str(run.path),
        **run.state(),
        "suspect": busy_before(run.facts()),
        "unfinished": _unfinished(run),
        "levels": [{**result.model_dump(mode="json"), "launch": launch} for launch, result in run.levels()],
        "answer": found.model_dump(mode="json") if found else None,
    }


def run_view(run: "Run") -> "RenderableType":
    """A run as people read it."""
    from rich.console import Group
    from rich.text import Text

    from harness.publish.tables import levels_table, seeds_row
    from harness.run import answer
    from harness.run.facts import busy_before

    plan, state = run.plan(), run.state()
    parts: list[RenderableType] = [Text(f"{run.run_id}: {run.told_state()}\n{safe(plan.question)}")]
    if error := state.get("error"):
        parts.append(Text(safe(str(error))))
    if plan.allow_drift:
        parts.append(Text(f"environments may differ from their locks: {safe(plan.allow_drift)}"))
    parts += [Text(safe(f"suspect: {line}")) for line in busy_before(run.facts())]
    done = list(run.levels())
    begun = {(one["launch"], one["level"]): one for one in _unfinished(run)}
    for launch in plan.launches:
        results = [result for name, result in done if name == launch.name]
        label = " (simulated)" if any(result.simulated for result in results) else ""
        if node := run.launch(launch.name).get("node"):
            label += f" on {safe(node['nodes'] or node['name'])}, job {node['job']}"
        missing = [cell.level.name for cell in launch.cells if run.level(launch.name, cell.level.name) is None]
        if results:
            rows = "\n".join(["", f"{launch.name}{label}", *(seeds_row(result) for result in results)])
            parts.append(Text(rows, no_wrap=True, overflow="ignore"))
            parts.append(levels_table(results, ""))
        if missing:
            named = [f"{level}{_how_far(begun.get((launch.name, level)))}" for level in missing]
            parts.append(Text(f"{launch.name}: not measured: {', '.join(named)}"))
        for result in results:
            parts += [
                Text(f"  {result.level['name']} {result.verdict.state}: {reason.message}")
                for reason in result.verdict.reasons
            ]
    if found := answer.stored(run):
        parts += answer_view(found)
    return Group(*parts)


def answer_view(found: "Answer") -> "list[RenderableType]":
    """An answer: its comparisons, then what stands beyond them."""
    from rich.text import Text

    from harness.publish.tables import beyond_notes

    beyond = beyond_notes(found.factorial, [promise.sentence for promise in found.promises])
    return [*comparisons_view(found.comparisons), *(Text(safe(line)) for line in (*beyond, *found.notes))]


def _unfinished(run: "Run") -> list[dict[str, Any]]:
    """How far levels got that are still going on, or were when the harness was killed."""
    found = []
    for launch, cell in run.plan().cells():
        name = cell.level.name
        if run.level(launch.name, name) is None and (records := list(run.requests(launch.name, name))):
            ended = [record for record in records if record.phase == "measure" and record.reason != "stopped"]
            counts = {"completed": len(ended), "ok": sum(record.ok for record in ended), "of": cell.level.requests}
            found.append({"launch": launch.name, "level": name, **counts})
    return found


def _how_far(begun: dict[str, Any] | None) -> str:
    if begun is None:
        return ""
    of = f" of {begun['of']}" if begun["of"] else ""
    failed = f", {begun['completed'] - begun['ok']} failed" if begun["completed"] > begun["ok"] else ""
    return f" ({begun['completed']}{of} requests had completed{failed})"


def comparisons_view(comparisons: "Sequence[Comparison]") -> "list[RenderableType]":
    """A table for each comparison, then what is to be said about it."""
    from rich.text import Text

    from harness.publish.tables import comparison_notes, comparison_table

    parts: list[RenderableType] = []
    for comparison in comparisons:
        parts += [Text(""), comparison_table(comparison)]
        parts += [Text(line) for line in comparison_notes(comparison)]
    return parts


def newest() -> Path:
    """The newest run of the folder `runs`, whatever its name: the one that was last carried out.

    Raises:
        InputError: there is none.
    """
    found = [path.parent for path in Path("runs").glob("*/plan.json")]
    if not found:
        raise InputError("there is no run in `runs`", hint="`harness run RECIPE` makes one; or name a run folder")
    return max(found, key=_touched)


def _touched(run: Path) -> tuple[int, str]:
    """When a run's state last changed; by name where a copy gave several the same instant."""
    state = run / "run.json"
    return (state if state.is_file() else run / "plan.json").stat().st_mtime_ns, run.name
