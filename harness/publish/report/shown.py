"""What a report shows of a run or of a published table: values from stored records, and nothing that they do not say.

Whatever a run folder lacks (it still goes on, was killed, measured one level, compares nothing) is absent here too, and
what cannot be read is named in `troubles` rather than left out in silence.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import Fault, HarnessError, InputError
from harness.recipe import references
from harness.recipe.plan import Plan, PlannedLaunch
from harness.recipe.references import Reference
from harness.run import answer as answering
from harness.run import store
from harness.run.answer import Answer
from harness.run.facts import busy_before
from harness.run.store import Run
from harness.stats.arms import Cell, cell_of
from harness.stats.comparison import Comparison
from harness.stats.level import LevelResult

FEW = 4  # runs that are compared and drawn over each other: of more, a report shows the course
_START = len("2026-01-31T120000")  # of a run's id: usually enough to tell runs apart
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Level:
    """One finished level of one launch; `result` is None for a published one."""

    launch: str
    arm: str
    cell: Cell
    result: LevelResult | None = None

    @property
    def label(self) -> str:
        """The level as people call it."""
        return label(self.cell.level, self.cell.key)

    @property
    def acceptance(self) -> float | None:
        """Tokens a verify step yielded, where the server speculated and said so."""
        value = self.result.server.get("acceptance_length") if self.result else None
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class Launch:
    """One server start: what was stored about it, its finished levels, and what each other planned level came to."""

    name: str
    arm: str
    record: Mapping[str, Any]
    levels: tuple[Level, ...]
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A run or a published table, as far as it is known.

    Attributes:
        name: the run's id, or the reference's name.
        path: where it was read.
        question: what the recipe asks.
        state: as people are told it.
        simulated: whether a simulated engine made any of its numbers.
        launches: in the plan's order.
        plan: None for a published table.
        answer: the stored answer, None where there is none (yet).
        facts: of the machine, before the run.
        record: `run.json`.
        busy: what says that others used the machine before the run began.
        published: where a published table comes from.
        troubles: what could not be read, and why.
    """

    name: str
    path: Path
    question: str
    state: str
    simulated: bool
    launches: tuple[Launch, ...]
    plan: Plan | None = None
    answer: Answer | None = None
    facts: Mapping[str, Any] | None = None
    record: Mapping[str, Any] | None = None
    busy: tuple[str, ...] = ()
    published: Reference | None = None
    troubles: tuple[str, ...] = ()

    @property
    def run(self) -> Run | None:
        """Its folder; None for a published table."""
        return Run(self.path) if self.plan else None

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms' names, in the recipe's order."""
        named = self.plan.arms if self.plan else [launch.arm for launch in self.launches]
        return tuple(dict.fromkeys(named))

    def levels(self) -> Iterator[Level]:
        """Every finished level, in the order they ran."""
        for launch in self.launches:
            yield from launch.levels


def label(level: Mapping[str, Any], key: str) -> str:
    """`C=4`, `2.5 req/s`, or the level's own name."""
    if level.get("mode") == "closed":
        return f"C={level['concurrency']}"
    return f"{level['rate']:g} req/s" if level.get("rate") is not None else key


def read_all(paths: Sequence[Path]) -> list[Shown]:
    """Read runs and published tables.

    Raises:
        InputError: paths that are neither; all of them at once.
    """
    found: list[Shown] = []
    faults: list[Fault] = []
    for path in dict.fromkeys(paths):
        try:
            found.append(_published(path) if references.is_reference(path) else _run(path))
        except InputError as error:
            faults += error.faults or [Fault(error.message, hint=error.hint)]
    if faults:
        raise InputError.of(faults)
    names = Counter(one.name for one in found)
    return [one if names[one.name] == 1 else replace(one, name=str(one.path)) for one in found]


def between(shown: Sequence[Shown]) -> tuple[Comparison, ...]:
    """How a few runs, or a few published tables, compare with the first of them; empty where that means nothing."""
    if not 1 < len(shown) <= FEW:
        return ()
    try:
        if all(one.published for one in shown):
            return references.compare_published([one.path for one in shown]).comparisons
        runs = [one.run for one in shown]
        return answering.across([run for run in runs if run]).comparisons if all(runs) else ()
    except InputError:  # different experiments have nothing to say to each other
        return ()


def _published(path: Path) -> Shown:
    reference = references.load(path)
    [launch] = reference.as_arm().launches
    levels = tuple(Level(launch.launch, reference.arm, cell) for cell in launch.cells)
    return Shown(
        name=reference.reference,
        path=path,
        question=f"Published: {reference.source}",
        state="published, not measured here",
        simulated=False,
        launches=(Launch(launch.launch, reference.arm, {}, levels, {}),),
        published=reference,
    )


def _run(path: Path) -> Shown:
    run = store.open_run(path)
    plan = run.plan()
    troubles: list[str] = []
    launches = tuple(_launch(run, planned, troubles) for planned in plan.launches)
    results = [level.result for launch in launches for level in launch.levels if level.result]
    nothing: Mapping[str, Any] = {}
    facts = tried(run.facts, nothing, troubles)
    return Shown(
        name=run.run_id,
        path=path,
        question=plan.question,
        state=tried(run.told_state, "not known", troubles),
        simulated=any(result.simulated for result in results) or any(_simulated(launch) for launch in launches),
        launches=launches,
        plan=plan,
        answer=tried(partial(answering.stored, run), None, troubles),
        facts=facts.get("before") or {},
        record=tried(run.state, nothing, troubles),
        busy=tuple(busy_before(facts)),
        troubles=tuple(troubles),
    )


def _launch(run: Run, planned: PlannedLaunch, troubles: list[str]) -> Launch:
    levels, missing = [], {}
    nothing: Mapping[str, Any] = {}
    for cell in planned.cells:
        name = cell.level.name
        result = tried(partial(run.level, planned.name, name), None, troubles)
        if result is not None:
            levels.append(Level(planned.name, planned.arm, cell_of(result), result))
        else:
            how_far = partial(_how_far, run, planned.name, name, cell.level.requests)
            missing[name] = tried(how_far, "not readable", troubles)
    return Launch(
        name=planned.name,
        arm=planned.arm,
        record=tried(partial(run.launch, planned.name), nothing, troubles),
        levels=tuple(levels),
        missing=missing,
    )


def _how_far(run: Run, launch: str, level: str, requests: int | None) -> str:
    """What became of a level that is not finished."""
    measured = [record for record in run.requests(launch, level) if record.phase == "measure"]
    records = [record for record in measured if record.reason != "stopped"]
    if not measured:
        return "not begun"
    failed = sum(not record.ok for record in records)
    of = f" of {requests}" if requests else ""
    return f"not finished: {len(records)}{of} requests ended" + (f", {failed} of them badly" if failed else "")


def _simulated(launch: Launch) -> bool:
    return bool(launch.record.get("simulated"))


def tried(read: Callable[[], T], otherwise: T, troubles: list[str]) -> T:
    """What was read, or what stands for it where one file of a run is damaged; `troubles` gets the reason."""
    try:
        return read()
    except HarnessError as error:
        troubles.append(error.message)
        return otherwise
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # edited into what no harness wrote
        troubles.append(f"what is stored does not read: {type(error).__name__}: {error}")
        return otherwise


def named(shown: Sequence[Shown]) -> dict[tuple[str, str], str]:
    """A name for each arm of each run, `(run, arm)`: the arm's own where that is enough to tell them apart."""
    pairs = [(one.name, arm) for one in shown for arm in one.arms]
    arms = [arm for _, arm in pairs]
    starts = {one.name: one.name[:_START] for one in shown}
    short = starts if len(set(starts.values())) == len(starts) else {one.name: one.name for one in shown}
    return {(run, arm): arm if arms.count(arm) == 1 else f"{arm} ({short[run]})" for run, arm in pairs}


def treatments(shown: Sequence[Shown]) -> dict[str, str]:
    """The same names by what a comparison calls an arm: by its own name, or across runs with that of its run."""
    names = named(shown)
    apart = {f"{arm} ({run})": name for (run, arm), name in names.items()}
    return {**apart, **{arm: name for (_, arm), name in names.items() if name == arm}}


def verdict_counts(levels: Iterable[Level]) -> dict[str, int]:
    """How many levels are valid, suspect, invalid and not run."""
    counts = dict.fromkeys(("valid", "suspect", "invalid", "not run"), 0)
    for level in levels:
        counts[level.cell.state] += 1
    return counts
