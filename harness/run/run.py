"""A run: every launch of a plan in order, what was measured kept, what was started stopped, and a state that is true.

The program in one place: facts, then each launch on an executor, then the comparison.
"""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from harness.errors import HarnessError, InputError, Interrupted
from harness.recipe import identity
from harness.recipe.plan import Plan, PlannedCell, PlannedLaunch
from harness.recipe.site import Site
from harness.run import facts as machine
from harness.run.executors import local
from harness.run.store import Run, now
from harness.run.sweep import Tell


@dataclass(frozen=True, slots=True)
class Reusable:
    """Where a finished cell of an earlier run lies."""

    run: Run
    launch: str
    level: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `troubles` are failures that the plan said to go on after."""

    run: Run
    measured: int
    reused: int
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellFate:
    """What will become of one planned cell: `reuse`, `run`, or `stale` with what changed since it was measured."""

    launch: str
    level: str
    fate: str
    why: tuple[str, ...] = ()
    source: Reusable | None = field(default=None, repr=False)


def fates(plan: Plan, earlier: Sequence[Run]) -> list[CellFate]:
    """For every cell of a plan: is there a finished one to reuse, and if not, why not?"""
    finished = _finished(earlier)
    found = []
    for launch, cell in plan.cells():
        if (source := finished.get(cell.cell_id)) is not None:
            found.append(CellFate(launch.name, cell.level.name, "reuse", source=source))
        elif (old := _namesake(earlier, launch, cell)) is not None:
            found.append(CellFate(launch.name, cell.level.name, "stale", tuple(identity.changes(old, cell.identity))))
        else:
            found.append(CellFate(launch.name, cell.level.name, "run"))
    return found


def execute(run: Run, plan: Plan, site: Site, tell: Tell, *, reuse: Sequence[CellFate] = ()) -> Outcome:
    """Carry a plan out, writing everything down as it happens.

    Raises:
        Interrupted: the user said stop; the server is stopped and what was measured is kept.
        HarnessError: a launch failed and the plan says to stop; what was measured is kept.
    """
    stop = threading.Event()
    job = local.Job(run, plan, site, tell, stop)
    sources = {(fate.launch, fate.level): fate.source for fate in reuse if fate.source}
    measured = reused = 0
    troubles: list[str] = []
    here = machine.collect()
    _refuse_other_hardware(here, [source.run for source in sources.values()])
    run.write_facts({"before": here})
    run.write_state("running", started=now())
    try:
        with interruptible(stop, tell):
            for launch in plan.launches:
                todo, kept = _split(run, launch, sources, tell)
                reused += kept
                if todo:
                    troubles += local.carry_out(job, launch, todo)
                    measured += len(todo)
                if stop.is_set():
                    raise Interrupted(f"stopped; `{run.path}` keeps what was measured", hint="go on with `--resume`")
    except HarnessError as error:
        run.write_state("interrupted" if isinstance(error, Interrupted) else "failed", error=str(error), ended=now())
        run.event("ended", error=error.message)
        raise
    except BaseException as error:
        run.write_state("interrupted", error=f"{type(error).__name__}: {error}", ended=now())
        raise
    finally:
        run.write_facts({"before": here, "after": machine.collect()})
    run.write_state("done", ended=now(), troubles=troubles)
    run.event("ended")
    return Outcome(run, measured, reused, tuple(troubles))


@contextmanager
def interruptible(stop: threading.Event, tell: Tell) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) finishes nothing new and stops the server; the second is at once."""

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        name = signal.Signals(number).name
        tell("note", text=f"{name}: stopping the server and keeping what is there; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _split(
    run: Run, launch: PlannedLaunch, sources: Mapping[tuple[str, str], Reusable], tell: Tell
) -> tuple[list[PlannedCell], int]:
    """The cells of a launch that are still to be measured, after taking over those that are not."""
    todo, kept = [], 0
    for cell in launch.cells:
        source = sources.get((launch.name, cell.level.name))
        if source is None:
            todo.append(cell)
            continue
        result = take_over(run, launch, cell, source)
        tell("level-done", launch=launch.name, level=cell.level.name, result=result, reused=True)
        kept += 1
    return todo, kept


def take_over(run: Run, launch: PlannedLaunch, cell: PlannedCell, source: Reusable) -> object:
    """Bring a finished cell of another run into this one; it keeps saying where it was measured."""
    result = source.run.level(source.launch, source.level)
    assert result is not None
    if source.run.path == run.path:
        return result
    target = run.start_requests(launch.name, cell.level.name)
    origin = source.run.level_folder(source.launch, source.level)
    for path in origin.iterdir():
        if path.name != "level.json" and path.is_file():
            (target.parent / path.name).write_bytes(path.read_bytes())
    if not run.launch(launch.name):
        run.write_launch(launch.name, {**source.run.launch(source.launch), "reused_from": source.run.run_id})
    moved = result.model_copy(update={"launch": launch.name, "arm": launch.arm, "block": launch.block})
    run.write_level(launch.name, moved)
    run.event("reused", launch=launch.name, level=cell.level.name, source=source.run.run_id)
    return moved


def _finished(earlier: Sequence[Run]) -> dict[str, Reusable]:
    """Cells whose numbers count, by identity; the newest run wins."""
    found: dict[str, Reusable] = {}
    for run in earlier:
        for launch, result in run.levels():
            if result.verdict.state in {"valid", "suspect"}:
                found.setdefault(result.cell_id, Reusable(run, launch, str(result.level["name"])))
    return found


def _namesake(earlier: Sequence[Run], launch: PlannedLaunch, cell: PlannedCell) -> Mapping[str, object] | None:
    """The identity of the finished cell that stood at the same place in an earlier plan."""
    for run in earlier:
        for old_launch, old in run.plan().cells():
            same = old_launch.name == launch.name and old.level.name == cell.level.name
            if same and run.level(old_launch.name, old.level.name) is not None:
                return old.identity
    return None


def _refuse_other_hardware(here: Mapping[str, object], sources: Sequence[Run]) -> None:
    """Cells from other hardware may not stand in one table with cells from here."""
    mine = machine.hardware_class(here)
    for path in sorted({run.path for run in sources}):
        other = machine.hardware_class(Run(path).facts().get("before", {}))
        if other != mine:
            raise InputError(
                f"the cells of `{path}` were measured on other hardware",
                details=[f"there: {other}", f"here:  {mine}"],
                hint="run without --resume",
            )
