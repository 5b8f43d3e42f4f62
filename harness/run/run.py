"""A run: every launch of a plan in order, what was measured kept, what was started stopped, and a state that is true.

The program in one place: facts, then each launch on an executor, then the comparison.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from harness.errors import HarnessError, Interrupted, MeasurementError
from harness.recipe.plan import Plan, PlannedCell, PlannedLaunch
from harness.recipe.site import Site
from harness.run import facts as machine
from harness.run import inputs
from harness.run.executors import local
from harness.run.resume import CellFate, Reusable, refuse_other_hardware, take_over
from harness.run.store import Run, now
from harness.run.sweep import Tell


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `troubles` are failures that the plan said to go on after."""

    run: Run
    measured: int
    reused: int
    troubles: tuple[str, ...] = ()


More = Callable[[Plan], Plan | None]
_RESUME = "go on with `--resume`"


def execute(
    run: Run, plan: Plan, site: Site, tell: Tell, *, reuse: Sequence[CellFate] = (), more: More = lambda _: None
) -> Outcome:
    """Carry a plan out, writing everything down as it happens.

    Args:
        run: its folder.
        plan: the plan.
        site: site facts.
        tell: takes events for whoever watches.
        reuse: cells that need not be measured again.
        more: asked when every launch is done: a plan with launches added, or None when that was all.

    Raises:
        Interrupted: the user said stop; the server is stopped and what was measured is kept.
        HarnessError: a launch failed and the plan says to stop; what was measured is kept.
    """
    stop = threading.Event()
    deadline = time.monotonic() + plan.run_timeout_s if plan.run_timeout_s else math.inf
    servers = local.Kept()
    job = local.Job(run, plan, site, tell, stop, deadline, kept=servers)
    sources = {(fate.launch, fate.level): fate.source for fate in reuse if fate.source}
    measured = reused = 0
    troubles: list[str] = []
    earlier = [source.run for source in sources.values()]
    with run.held(), _recorded(run, earlier), interruptible(stop, tell), servers:
        for launch in _launches(job, more):
            todo, kept = _split(run, launch, sources, tell)
            reused += kept
            if todo:
                servers.make_room(launch)
                troubles += local.carry_out(job, launch, todo)
                measured += len(todo)
            _stop_here(job)
    run.event("ended")
    run.write_state("done", ended=now(), troubles=troubles)
    return Outcome(run, measured, reused, tuple(troubles))


def _launches(job: local.Job, more: More) -> Iterator[PlannedLaunch]:
    """Every launch of the plan, and then those that the run decides to add."""
    plan: Plan | None = job.plan
    done = 0
    while plan is not None:
        yield from plan.launches[done:]
        done = len(plan.launches)
        if (plan := more(plan)) is not None:
            job.run.write_plan(plan)
            job.tell("note", text=f"one more block: {plan.refined[-1]}")


def _stop_here(job: local.Job) -> None:
    """Raise where the run may not go on."""
    if job.stop.is_set():
        raise Interrupted(f"stopped; {_keeps(job.run)}", hint=_RESUME)
    if time.monotonic() > job.deadline:
        allowed = f"{job.plan.run_timeout_s:g} s"
        raise MeasurementError(f"the run took longer than the {allowed} it may; {_keeps(job.run)}", hint=_RESUME)


def _keeps(run: Run) -> str:
    return f"`{run.path}` keeps what was measured"


@contextmanager
def _recorded(run: Run, sources: Sequence[Run]) -> Iterator[None]:
    """Machine facts before and after, and a state that is true however it ends."""
    here = machine.collect()
    refuse_other_hardware(here, sources)
    inputs.keep(run, run.plan())
    run.write_facts({"before": here})
    run.write_state("running", started=run.state().get("started") or now(), error=None, ended=None)
    run.withdraw_answer()
    try:
        yield
    except HarnessError as error:
        run.write_state("interrupted" if isinstance(error, Interrupted) else "failed", error=str(error), ended=now())
        run.event("ended", error=error.message)
        raise
    except KeyboardInterrupt:
        run.write_state("interrupted", error="interrupted twice", ended=now())
        raise Interrupted(f"stopped at once; {_keeps(run)}", hint=_RESUME) from None
    except BaseException as error:
        run.write_state("interrupted", error=f"{type(error).__name__}: {error}", ended=now())
        raise
    finally:
        run.write_facts({"before": here, "after": machine.collect()})


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
