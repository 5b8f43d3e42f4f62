"""Finished work is never done twice: which planned cells an earlier run has measured, and why others must run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import InputError
from harness.recipe import identity
from harness.recipe.plan import Plan, PlannedCell, PlannedLaunch
from harness.run import facts as machine
from harness.run import ledger
from harness.run.store import Run
from harness.stats.level import LevelResult

_COUNT = {"valid", "suspect"}  # verdicts of cells whose numbers count


@dataclass(frozen=True, slots=True)
class Reusable:
    """Where a finished cell of an earlier run lies, and the sha256 of its files, by name, from when it was finished.

    `noted` is empty where that run kept no digests.
    """

    run: Run
    launch: str
    level: str
    noted: Mapping[str, str] = field(default_factory=dict, repr=False)


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
    sound = _Sound()
    found = []
    for launch, cell in plan.cells():
        candidates = [sound.of(*place) for place in finished.get(cell.cell_id, ())]
        name = cell.level.name
        if source := next((one for one in candidates if isinstance(one, Reusable)), None):
            found.append(CellFate(launch.name, name, "reuse", source=source))
        elif candidates:
            found.append(CellFate(launch.name, name, "stale", tuple(map(str, candidates[:1]))))
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
        if path.name != "level.json" and ledger.is_current(path):
            (target.parent / path.name).write_bytes(path.read_bytes())
    if not run.launch(launch.name):
        said = source.run.launch(source.launch)
        facts = said.get("facts") or source.run.facts().get("before")  # of the machine it was, which may be another
        run.write_launch(launch.name, {**said, "facts": facts, "reused_from": source.run.run_id})
    moved = result.model_copy(update={"launch": launch.name, "arm": launch.arm, "block": launch.block})
    run.write_level(launch.name, moved)
    facts = {"source": source.run.run_id, "digests": dict(source.noted)}
    run.event("reused", launch=launch.name, level=cell.level.name, **facts)
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


def _finished(earlier: Sequence[Run]) -> dict[str, list[tuple[Run, str, str]]]:
    """Cells whose numbers count, by identity: run, launch and level of each, the newest run first."""
    found: dict[str, list[tuple[Run, str, str]]] = {}
    for run in earlier:
        for launch, result in run.levels():
            if result.verdict.state in _COUNT:
                found.setdefault(result.cell_id, []).append((run, launch, str(result.level["name"])))
    return found


class _Sound:
    """Whether finished cells are still what was measured; each run's list of digests is read once."""

    def __init__(self) -> None:
        self._noted: dict[Path, Mapping[str, ledger.Noted]] = {}

    def of(self, run: Run, launch: str, level: str) -> "Reusable | str":
        """The cell to reuse, or why its numbers are not those of a measurement."""
        if not run.keeps_digests():  # an older harness kept none
            return Reusable(run, launch, level)
        known = self._noted.setdefault(run.path, ledger.noted(run.path))
        folder = run.level_folder(launch, level)
        if others := ledger.changed(run.path, folder, known):
            return f"it was changed since it was measured: {', '.join(others)}"
        within = folder.relative_to(run.path).as_posix() + "/"
        digests = {path.removeprefix(within): one.sha256 for path, one in known.items() if path.startswith(within)}
        return Reusable(run, launch, level, digests)


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
