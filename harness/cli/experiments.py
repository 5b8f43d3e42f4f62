"""Verbs: plan and run. From a recipe to a plan that starts nothing, and from a plan to a run folder."""

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import cluster
from harness.cli.talk import Verbs, common
from harness.errors import HarnessError, InputError, MeasurementError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.recipe.expand import Expanded
    from harness.recipe.plan import Plan
    from harness.recipe.site import Site
    from harness.recipe.where import Value
    from harness.run.resume import CellFate
    from harness.run.run import More
    from harness.run.store import Run


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    plan = common(verbs.add_parser("plan", help="show exactly what a recipe would run; starts nothing"))
    _recipe_options(plan)
    plan.add_argument("--where", action="store_true", help="show where each value was written, by file and line")
    plan.set_defaults(run=show_plan)
    run = common(verbs.add_parser("run", help="carry a recipe out: launch, warm up, sweep, compare, publish"))
    _recipe_options(run)
    run.add_argument(
        "--wait-free", default="0", metavar="TIME", help="wait for a port or GPU in use by others: 90s, 10m, 1h"
    )
    run.add_argument("--no-publish", action="store_true", help="leave documents and LOGBOOK.md alone")
    run.add_argument("--detach", action="store_true", help="on Slurm: submit, and leave; `harness follow RUN` later")
    run.add_argument(
        "--cancel-hopeless", action="store_true", help="on Slurm: cancel jobs that wait for what only a person can end"
    )
    run.set_defaults(run=run_recipe)


def _recipe_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", type=Path, help="a recipe file")
    verb.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)")
    verb.add_argument("--on", choices=("local", "slurm"), default="local", help="where (default: this machine)")
    verb.add_argument("--site", type=Path, metavar="FILE", help="site facts (default: ~/.config/harness/site.yaml)")
    verb.add_argument("--name", help="name of the run folder (default: time, recipe and plan)")
    verb.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="RUN",
        help="reuse finished cells of earlier runs of this recipe, or of one run",
    )


def show_plan(arguments: argparse.Namespace) -> int:
    """`harness plan`."""
    from harness.recipe import where
    from harness.recipe.decide import decide
    from harness.recipe.site import load as load_site
    from harness.run.resume import fates

    site = load_site(arguments.site)
    expanded, plan = decide(arguments.recipe, site)
    found = fates(plan, _earlier(arguments, plan))
    scripts = cluster.scripts(arguments, plan, site) if arguments.on == "slurm" else []
    written = where.written(expanded)
    data = {
        "digest": plan.digest,
        **plan.model_dump(mode="json"),
        "cells": [{"launch": f.launch, "level": f.level, "fate": f.fate, "why": list(f.why)} for f in found],
        "where": [asdict(value) for value in written],
        **({"slurm": scripts} if scripts else {}),
    }
    arguments.talk.data(data, _plan_view(plan, found, written if arguments.where else []))
    if scripts and not arguments.talk.as_json:  # as they are: a wrapped line would be another script
        arguments.talk.data(None, "\n".join(["", *scripts]))
    _tell_missing(arguments, plan)
    if not arguments.resume and any(fate.fate == "reuse" for fate in found):
        arguments.talk.line("reuse and stale are what `--resume` would do; without it every cell is run")
    return 0


def _tell_missing(arguments: argparse.Namespace, plan: "Plan") -> None:
    """What a run would refuse for want of a document; nothing is loaded for a plan that publishes nothing."""
    if plan.publish:
        from harness.publish import targets

        for trouble in targets.missing(plan, project_folder()):
            arguments.talk.line(f"warning: `harness run` will refuse: {trouble.message}")


@dataclass(frozen=True, slots=True)
class Begun:
    """A run about to be carried out: its folder, its plan, and what need not be measured again."""

    run: "Run"
    plan: "Plan"
    expanded: "Expanded"
    fates: "list[CellFate]"
    root: Path  # documents are named from here


def begin(arguments: argparse.Namespace, site: "Site", check: "Callable[[Plan], None]") -> Begun:
    """From a recipe to a run folder; `check` looks for what is needed, before there is one.

    Raises:
        HarnessError: something is wrong with the recipe, its rules say no, or a need is not met.
    """
    from harness.publish import records, targets
    from harness.recipe.decide import decide
    from harness.run import store
    from harness.run.resume import fates

    talk = arguments.talk
    expanded, plan = decide(arguments.recipe, site)
    _refuse(plan, expanded)
    earlier = _earlier(arguments, plan) if arguments.resume else []
    run = _going_on(arguments, earlier, plan) if arguments.resume else None
    root = project_folder()
    if not arguments.no_publish:
        targets.check(plan, root)
        if any(target["kind"] == "record" for target in plan.publish):
            records.check(plan)
    check(plan)
    for finding in plan.findings:
        talk.line(str(finding))
    if run is not None:
        plan = run.plan()  # with the blocks that it added, if it refines
    found = fates(plan, earlier) if arguments.resume else []
    run = run or store.create(arguments.out, plan, name=arguments.name)
    talk.line(f"run {run.run_id}: {len(plan.launches)} launches, {sum(1 for _ in plan.cells())} cells")
    for fate in found:
        why = f" because {'; '.join(fate.why)}" if fate.why else ""
        talk.line(f"  {fate.launch} {fate.level}: {fate.fate}{why}")
    return Begun(run, plan, expanded, found, root)


def run_recipe(arguments: argparse.Namespace) -> int:
    """`harness run`."""
    from harness.cli.live import LiveView
    from harness.publish import targets
    from harness.recipe.site import load as load_site
    from harness.run import needs
    from harness.run.run import execute

    talk = arguments.talk
    site = load_site(arguments.site)
    if arguments.on == "slurm":
        return cluster.run_recipe(arguments, site)
    if arguments.detach or arguments.cancel_hopeless:
        raise InputError("`--detach` and `--cancel-hopeless` are about jobs", hint="they go with `--on slurm`")

    def check(plan: "Plan") -> None:
        for trouble in needs.before(plan, site, arguments.out, wait_s=_seconds(arguments.wait_free)):
            talk.line(f"warning: {trouble}")

    begun = begin(arguments, site, check)
    run, plan, expanded, found, root = begun.run, begun.plan, begun.expanded, begun.fates, begun.root
    with LiveView(talk, cells=sum(1 for _ in plan.cells()), run=run) as view:
        try:
            outcome = execute(run, plan, site, view.tell, reuse=found, more=more_of(run, plan, expanded, site))
        except HarnessError:
            if not arguments.no_publish and (line := targets.log_failure(run, plan, root)):
                talk.line(line)
            raise
    return conclude(arguments, run, root, outcome.troubles)


def conclude(arguments: argparse.Namespace, run: "Run", root: Path, troubles: tuple[str, ...]) -> int:
    """A run that is done: its answer, its documents, and its exit code."""
    from harness.publish import targets
    from harness.run import answer

    answered = answer.answer(run)
    if answered:
        answer.store(run, answered)
    if not arguments.no_publish:
        for line in targets.publish(run, run.plan(), answered, root):
            arguments.talk.line(line)
    return _finish(arguments, run, troubles)


def _refuse(plan: "Plan", expanded: "Expanded") -> None:
    """A rule of severity error stops the run unless the recipe accepts it by id, with a reason."""
    from harness.recipe.findings import refused

    stopping = refused(list(plan.findings), expanded.recipe.accept)
    if stopping:
        raise InputError(
            "rules say that this cannot work",
            details=[f"{finding.id}: {finding.message}" for finding in stopping],
            hint="do what `harness plan` says, or accept a rule in the recipe: `accept: {ID: REASON}`",
        )


def _seconds(text: str) -> float:
    """`90s`, `10m`, `1h` or plain seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if not match:
        raise InputError(f"`{text}` is not a time", hint="write 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def more_of(run: "Run", plan: "Plan", expanded: "Expanded", site: "Site") -> "More":
    """How a run that refines adds blocks to its plan; any other adds none."""
    from harness.recipe import plan as planning
    from harness.recipe.gather import gather
    from harness.run import answer

    if plan.refine is None:
        return lambda _: None
    decide, found = answer.refining(run, plan), gather(expanded, site)

    def more(current: "Plan") -> "Plan | None":
        step = decide(current)
        return None if step.done else planning.extend(current, expanded, found, step.levels, step.reason)

    return more


def _finish(arguments: argparse.Namespace, run: "Run", troubles: tuple[str, ...]) -> int:
    from harness.cli.results import run_data, run_view

    arguments.talk.data(run_data(run), run_view(run))
    bad = [f"{launch} {result.level['name']}" for launch, result in run.levels() if result.verdict.state == "invalid"]
    if bad:
        raise MeasurementError(
            f"run `{run.run_id}` ended, but not every level counts",
            details=[*troubles, *(f"invalid: {cell}" for cell in bad)],
            hint=f"`harness show {run.path}` says why",
        )
    for trouble in troubles:
        arguments.talk.line(f"warning: {trouble}; measured again on a fresh one")
    return 0


def project_folder() -> Path:
    """Documents are named from the project's top folder, or from the working directory outside a project."""
    from harness.env import places

    try:
        return places.project_root()
    except InputError:
        return Path.cwd()


def _earlier(arguments: argparse.Namespace, plan: "Plan") -> "list[Run]":
    from harness.run import store

    if isinstance(arguments.resume, str):
        return [store.open_run(Path(arguments.resume))]
    return store.find(arguments.out, plan.recipe)


def _going_on(arguments: argparse.Namespace, earlier: "list[Run]", plan: "Plan") -> "Run | None":
    """The newest run of this very plan, to go on in; where it is whole, all of it is reused.

    Raises:
        InputError: another name was asked for; to go on in the old one in silence would write where nobody looks.
    """
    run = next((run for run in earlier if run.plan().digest == plan.digest), None)
    if run is not None and arguments.name not in {None, run.run_id}:
        hint = "leave out --name to go on with it, or --resume to measure everything anew"
        raise InputError(f"`--name {arguments.name}`: `{run.path}` is a run of this very plan already", hint=hint)
    return run


def _plan_view(plan: "Plan", found: "list[CellFate]", written: "list[Value]") -> "RenderableType":
    from rich.console import Group

    from harness.publish.plans import findings_text, plan_table, plan_text, where_table

    places = [where_table(written)] if written else []
    return Group(plan_text(plan), *places, plan_table(plan, found), *findings_text(plan))
