"""Verbs: verify, reproduce. Does what a run stores follow from what was measured, and would one get it again?"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.talk import Talk, Verbs, common, safe
from harness.errors import AnswerIsNo, InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.recipe.plan import Plan
    from harness.recipe.site import Site
    from harness.run.reproduce import Reproduction
    from harness.run.store import Run


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    verify = common(
        verbs.add_parser(
            "verify",
            help="derive every stored number and digest of a run again",
            description="Derive everything again that a run stores: each level's metrics, window, throughput, goodput "
            "and verdict from its requests, the comparison from the levels, and every digest from its file. Works on "
            "runs that were killed, and says what could not be checked. Exit code 1 when something differs.",
        )
    )
    verify.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: the newest)")
    verify.set_defaults(run=verify_runs)
    reproduce = common(
        verbs.add_parser(
            "reproduce",
            help="make a stored run again and say whether the same comes out",
            description="Build the environments of a run from the locks in its record, carry its plan out once more, "
            "and test each level of each arm for equivalence with what was stored. Says `reproduced within x %`, or "
            "what differs: levels, machine, driver, harness. Exit code 1 when it is not reproduced.",
        )
    )
    reproduce.add_argument("stored", type=Path, metavar="RUN", help="a run folder, or its record")
    reproduce.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)"
    )
    reproduce.add_argument("--name", help="name of the new run folder (default: time, recipe and plan)")
    reproduce.add_argument(
        "--margin", type=_share, help="a ratio this near 1 is the same (default: the recipe's, or 0.02)"
    )
    reproduce.add_argument("--resume", action="store_true", help="go on with the newest attempt to reproduce this run")
    reproduce.add_argument("--offline", action="store_true", help="build from the wheelhouse alone")
    reproduce.set_defaults(run=reproduce_run)


def verify_runs(arguments: argparse.Namespace) -> int:
    """`harness verify`: 0 when everything comes out as stored."""
    from harness.cli.results import newest
    from harness.run import store, verify

    found = [verify.verify(store.open_run(path)) for path in arguments.runs or [newest()]]
    data = [one.to_json() for one in found]
    shown = "\n".join(safe(line) for one in found for line in verify.shown(one))
    arguments.talk.data(data if len(data) > 1 else data[0], shown)
    return AnswerIsNo.exit_code if any(one.differences for one in found) else 0


def _share(text: str) -> float:
    """A number between 0 and 1, both left out."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not between 0 and 1")
    return value


def reproduce_run(arguments: argparse.Namespace) -> int:
    """`harness reproduce`: 0 when every level comes out again."""
    from harness.recipe.site import load as load_site
    from harness.run import reproduce, store

    talk: Talk = arguments.talk
    stored = store.open_run(arguments.stored)
    plan = reproduce.plan_of(stored)
    if not any(True for _ in stored.levels()):
        raise InputError(f"`{stored.path}` has no finished level to reproduce")
    reproduce.refuse_changed(stored)
    with reproduce.standing_in(stored):
        again = _again(arguments, stored, plan, load_site())
    margin = arguments.margin or (plan.compare or {}).get("margin") or 0.02
    found = reproduce.compared(stored, again, margin)
    reproduce.keep(again, found)
    data = {"reproduced": found.reproduced, "sentence": found.sentence, **found.model_dump(mode="json")}
    talk.data(data, _reproduction_view(found))
    if again.told_state() != "done":
        talk.line(f"warning: `{again.path}` is {again.told_state()}")
    return 0 if found.reproduced else AnswerIsNo.exit_code


def _again(arguments: argparse.Namespace, stored: "Run", plan: "Plan", site: "Site") -> "Run":
    """The plan carried out once more, in a run of its own."""
    from harness.cli.live import LiveView
    from harness.run import answer, needs, reproduce, store
    from harness.run.resume import fates
    from harness.run.run import execute

    talk: Talk = arguments.talk
    _build(arguments, reproduce.environments(stored, plan))
    reproduce.check_models(plan, site)
    for trouble in needs.before(plan, site, arguments.out):
        talk.line(f"warning: {trouble}")
    earlier = reproduce.attempts(arguments.out, stored, plan) if arguments.resume else []
    again = earlier[0] if earlier else store.create(arguments.out, plan, name=arguments.name)
    again.write_state("planned", reproduces=stored.run_id)
    cells = sum(1 for _ in plan.cells())
    talk.line(f"run {again.run_id} makes {stored.run_id} again: {len(plan.launches)} launches, {cells} cells")
    with LiveView(talk, cells=cells, run=again) as view:
        execute(again, plan, site, view.tell, reuse=fates(plan, earlier[:1]))
    if (answered := answer.answer(again)) is not None:
        answer.store(again, answered)
    return again


def _build(arguments: argparse.Namespace, names: list[str]) -> None:
    """Have every environment, from the lock where the project stands now."""
    if not names:
        return
    from harness.cli.environments import showing_progress
    from harness.env import build, lock, places, spec

    for name in names:
        with showing_progress(arguments.talk) as progress:
            locked = lock.read(places.lock_path(name))
            if build.sound(locked, progress=progress) is None:
                build.build(locked, spec.load(places.spec_path(name)), offline=arguments.offline, progress=progress)


def _reproduction_view(found: "Reproduction") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=safe(f"{found.of} made again by {found.by}"), title_justify="left", header_style="bold")
    for name in ("arm", "level", "tok/s before", "tok/s now", "ratio", "within", ""):
        table.add_column(name, justify="right" if name in {"tok/s before", "tok/s now", "ratio", "within"} else "left")
    for level in found.levels:
        known = level.before is not None and level.now is not None
        table.add_row(
            level.arm,
            level.key,
            f"{level.before:.1f}" if known else "-",
            f"{level.now:.1f}" if known else "-",
            f"{(level.now or 0) / (level.before or 1):.3f}" if known else "-",
            "-" if level.within is None else f"{level.within:.1%}" + ("" if level.certain else " *"),
            safe(level.why) or ("apart" if level in found.apart else "the same"),
        )
    lines = [] if all(level.certain for level in found.levels) else ["* by point estimate; an interval needs launches"]
    lines += [comparison.equivalence.sentence for comparison in found.comparisons if comparison.equivalence]
    lines += [f"differs: {change}" for change in found.changes]
    lines += [f"another answer: {line}" for line in found.answers]
    return Group(table, *(Text(safe(line)) for line in lines), Text(safe(found.sentence)))
