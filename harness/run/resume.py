"""Finished work is never done twice: which planned cells an earlier run has measured, and why others must run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import InputError
from harness.recipe import identity
from harness.recipe.plan import Plan, PlannedCell, PlannedLaunch
from harness.run import facts as machine
from harness.run.store import Run
from harness.stats.level import LevelResult

_COUNT = {"valid", "suspect"}  # verdicts of cells whose numbers count


@dataclass(frozen=True, slots=True)
class Reusable:
    """Where a finished cell of an earlier run lies."""

    run: Run
    launch: str
    level: str


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
    earlier = list(_readable(earlier))  # once, not for every cell
    finished = _finished(earlier)
    planned = [_Earlier.of(run) for run in earlier]  # each plan is read once: with ten thousand cells it is large
    found = []
    for launch, cell in plan.cells():
        if (source := finished.get(cell.cell_id)) is not None:
            found.append(CellFate(launch.name, cell.level.name, "reuse", source=source))
        else:
            found.append(_fate(planned, launch, cell))
    return found


def take_over(run: Run, launch: PlannedLaunch, cell: PlannedCell, source: Reusable) -> LevelResult:
    """Bring a finished cell of another run into this one; it keeps saying where it was measured."""
    result = source.run.level(source.launch, source.level)
    assert result is not None  # `fates` found it finished
    if source.run.path == run.path:
        return result
    target = run.start_requests(launch.name, cell.level.name)
    origin = source.run.level_folder(source.launch, source.level)
    for path in origin.iterdir():
        if path.name != "level.json" and path.is_file():
            (target.parent / path.name).write_bytes(path.read_bytes())
    if not run.launch(launch.name):
        said = source.run.launch(source.launch)
        facts = said.get("facts") or source.run.facts().get("before")  # of the machine it was, which may be another
        run.write_launch(launch.name, {**said, "facts": facts, "reused_from": source.run.run_id})
    moved = result.model_copy(update={"launch": launch.name, "arm": launch.arm, "block": launch.block})
    run.write_level(launch.name, moved)
    run.event("reused", launch=launch.name, level=cell.level.name, source=source.run.run_id)
    return moved


@dataclass(frozen=True, slots=True)
class _Earlier:
    """An earlier run and its cells by launch and level."""

    run: Run
    cells: Mapping[tuple[str, str], PlannedCell]

    @classmethod
    def of(cls, run: Run) -> "_Earlier":
        return cls(run, {(launch.name, cell.level.name): cell for launch, cell in run.plan().cells()})


def _fate(earlier: Sequence[_Earlier], launch: PlannedLaunch, cell: PlannedCell) -> CellFate:
    """Why a cell that cannot be reused must run: never measured, measured as something else, or in vain."""
    for each in earlier:
        old = each.cells.get((launch.name, cell.level.name))
        if old is None or (result := each.run.level(launch.name, cell.level.name)) is None:
            continue
        if changes := tuple(identity.changes(old.identity, cell.identity)):
            return CellFate(launch.name, cell.level.name, "stale", changes)
        why = result.verdict.reasons[0].message if result.verdict.reasons else "nobody knows why"
        return CellFate(launch.name, cell.level.name, "run", (f"it was {result.verdict.state}: {why}",))
    return CellFate(launch.name, cell.level.name, "run")


def _readable(earlier: Sequence[Run]) -> Iterator[Run]:
    """Earlier runs that can be read whole; a damaged one has nothing to reuse, and `show` says why."""
    for run in earlier:
        try:
            list(run.levels())
        except InputError:
            continue
        yield run


def _finished(earlier: Sequence[Run]) -> dict[str, Reusable]:
    """Cells whose numbers count, by identity; the newest run wins."""
    found: dict[str, Reusable] = {}
    for run in earlier:
        for launch, result in run.levels():
            if result.verdict.state in _COUNT:
                found.setdefault(result.cell_id, Reusable(run, launch, str(result.level["name"])))
    return found


def refuse_other_hardware(here: Mapping[str, object], sources: Sequence[Run]) -> None:
    """Cells from other hardware may not stand in one table with cells from here.

    Raises:
        InputError: some do; both machines are named.
    """
    mine = machine.hardware_class(here)
    for path in sorted({run.path for run in sources}):
        other = machine.hardware_class(Run(path).facts().get("before", {}))
        if other != mine:
            raise InputError(
                f"the cells of `{path}` were measured on other hardware",
                details=[f"there: {other}", f"here:  {mine}"],
                hint="run without --resume",
            )
