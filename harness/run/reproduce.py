"""A stored run made again from its record, and whether the same comes out: here or elsewhere, now or in a year.

The record holds what it takes: the plan, and copies of specs, locks, patches, recipe and prompts. While a run is made
again the project stands in that record, so that what has changed since in the working tree does not matter. Software
and questions are the same by their digests; what may differ is the machine, and it is named.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, InputError, LockError
from harness.files import sha256_file, write_json
from harness.recipe.identity import changes, model_facts
from harness.recipe.plan import Plan, PlannedArm
from harness.recipe.site import Site
from harness.run import answer, inputs, noise, store, verify
from harness.run.executors import local
from harness.run.facts import comparable
from harness.run.store import Run
from harness.stats.compare import Comparison, Settings, compare
from harness.stats.fairness import Permission
from harness.stats.intervals import interval
from harness.stats.level import Stored
from harness.stats.rows import Sides, contrast_of

FORMAT = "harness.reproduction/1"
_TOLD = 5  # differences that an error names
AGAIN = " again"  # after an arm's name, where the stored and the new one stand side by side


class Change(Stored):
    """One fact that is not as it was: of the machine, of what a server said of itself, or of the harness."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.before} before, {self.now} now"


class Level(Stored):
    """One level of one arm: throughput as stored and as measured again, tok/s, and how near they are.

    `within` is the smallest share that the difference is known to lie within: by the interval of two one-sided tests
    where there is one (`certain`), else by the point estimate. None where either side has no number; `why` says it.
    """

    arm: str
    key: str
    before: float | None
    now: float | None
    within: float | None
    certain: bool
    why: str = ""


class Reproduction(Stored):
    """What came of making a run again; `reproduction.json` in the new run."""

    format: str = FORMAT
    of: str
    by: str
    margin: float
    levels: tuple[Level, ...]
    changes: tuple[Change, ...]
    answers: tuple[str, ...] = ()  # rows of the run's own comparison whose verdict is another one now
    comparisons: tuple[Comparison, ...] = ()

    @property
    def reproduced(self) -> bool:
        """Whether every level lies within the margin."""
        return bool(self.levels) and not self.apart

    @property
    def apart(self) -> list[Level]:
        """The levels that do not, or of which it is not known."""
        return [level for level in self.levels if level.within is None or level.within > self.margin]

    @property
    def sentence(self) -> str:
        """In a line."""
        how = "" if all(level.certain for level in self.levels) else " by point estimate, 1 launch an arm: no interval"
        if not self.levels:
            return f"not reproduced: `{self.of}` has no level to compare"
        if not self.apart:
            farthest = max(level.within or 0.0 for level in self.levels)
            return f"reproduced within {farthest:.1%}{how}: {len(self.levels)} levels"
        told = "; ".join(map(_apart, self.apart[:6])) + ("; ..." if self.apart[6:] else "")
        return f"not reproduced within {self.margin:.0%}{how}: {len(self.apart)} of {len(self.levels)} levels: {told}"


@contextlib.contextmanager
def standing_in(run: Run) -> Iterator[None]:
    """The record as the project, as far as specs and locks go; one that kept none leaves the project as it is."""
    from harness.env import places  # noqa: PLC0415 - a quarter of a second, for runs without an environment

    folder = run.path.resolve() / inputs.FOLDER
    if not (folder / "envspecs").is_dir():
        yield
        return
    with places.standing_in(folder):
        yield


def refuse_changed(run: Run) -> None:
    """Nothing is held against numbers that somebody edited.

    Raises:
        InputError: what the run stores does not follow from what it measured; names what differs.
    """
    found = verify.verify(run)
    if found.differences:
        told = [str(one) for one in found.differences[:_TOLD]]
        more = len(found.differences) - len(told)
        raise InputError(
            f"`{run.path}` is not what was measured: {len(found.differences)} of what it stores differ",
            details=[*told, *([f"and {more} more"] if more else [])],
            hint=f"`harness verify {run.path}` names them all",
        )


def plan_of(run: Run) -> Plan:
    """The plan to carry out once more: the stored one, with its recipe and prompts where they can be found unchanged.

    Raises:
        InputError: it spans machines, or a prompt set is not to be had as it was.
    """
    plan = run.plan()
    if spanning := [arm.name for arm in plan.arms.values() if arm.nodes > 1]:
        raise InputError(
            f"servers of `{run.run_id}` span machines: {', '.join(spanning)}",
            hint="run its recipe on the cluster and `harness compare` the two runs",
        )
    path, copy = Path(plan.recipe_path), inputs.recipe(run, plan)
    same = path.is_file() and sha256_file(path) == plan.recipe_sha256
    if same and inputs.prompts_as_planned(plan, path.parent):
        return plan
    if copy is not None and inputs.prompts_as_planned(plan, copy.parent):
        return plan.model_copy(update={"recipe_path": str(copy)})
    if inputs.prompts_as_planned(plan, path.parent):
        return plan
    names = ", ".join(sorted({f"`{arm.workload['prompts']}`" for arm in plan.arms.values()}))
    raise InputError(
        f"the prompts of `{run.run_id}` are not to be had as they were: {names}",
        hint="put the set back where the recipe names it; its sha256 stands in plan.json",
    )


def environments(run: Run, plan: Plan) -> list[str]:
    """The names of a plan's environments, each with a lock here that has the planned `env_id`.

    Raises:
        LockError: the record kept no copy of a lock, and the project's is another one by now.
    """
    from harness.env import lock, places  # noqa: PLC0415 - as above

    wanted = sorted({(arm.env, str(arm.env_id)) for arm in plan.arms.values() if arm.env})
    for name, env_id in wanted:
        seen = lock.read(places.lock_path(name))
        if seen.env_id != env_id:
            raise LockError(
                f"`{run.run_id}` was measured with another `{name}`, and kept no copy of its lock",
                details=[f"measured with {env_id[:16]}, here is {seen.env_id[:16]}"],
                hint="take the lock of that time from version control",
            )
    return [name for name, _ in wanted]


def check_models(plan: Plan, site: Site) -> None:
    """Make sure that each model is the one that was measured, as far as the plan knows what identifies it.

    Raises:
        InputError: one is another; every difference by name.
    """
    found: list[str] = []
    for arm in plan.arms.values():
        if arm.url is None and arm.model is not None and arm.model.facts:
            served = local.model(arm, local.environment(plan, arm), site)
            seen = model_facts(Path(served.path)) if served else {}
            found += [f"{arm.name}: {line}" for line in changes(arm.model.facts, seen)]
    if found:
        raise InputError("the model is not the one that was measured", details=found)


def attempts(folder: Path, run: Run, plan: Plan) -> list[Run]:
    """Earlier attempts to make a run again by this plan, newest first."""
    found = [one for one in store.find(folder, plan.recipe) if one.state().get("reproduces") == run.run_id]
    return [one for one in found if one.plan().digest == plan.digest]


def compared(run: Run, again: Run, margin: float) -> Reproduction:
    """Hold a run made again against the stored one, arm by arm and level by level.

    Args:
        run: the stored run.
        again: the new one, of the same plan.
        margin: a ratio this near 1 is the same.
    """
    old, new = answer.arms(run), answer.arms(again)
    plan = run.plan()
    pairs = [(plan.arms[name], old[name], replace(new[name], name=name + AGAIN)) for name in old if name in new]
    settings = {arm.name: _settings(again, arm, margin) for arm, _, _ in pairs}
    comparisons = tuple(compare(base, other, settings[arm.name]) for arm, base, other in pairs)
    return Reproduction(
        of=run.run_id,
        by=again.run_id,
        margin=margin,
        levels=tuple(
            level
            for (arm, base, other), comparison in zip(pairs, comparisons, strict=True)
            for level in _levels(arm.name, Sides(base, other, settings[arm.name]), comparison)
        ),
        changes=tuple(_changes(run, again, comparisons)),
        answers=tuple(_answers(run, again)),
        comparisons=comparisons,
    )


def keep(again: Run, found: Reproduction) -> None:
    """Write `reproduction.json` into the new run."""
    write_json(again.path / "reproduction.json", found.model_dump(mode="json"), mode=0o600)


def _settings(again: Run, arm: PlannedArm, margin: float) -> Settings:
    """Separate runs are not paired, and what differs between them is told rather than forbidden."""
    everything = Permission(treatment=("*",), accepted=("*",))
    return Settings(margin=margin, paired=False, permission=everything, noise=noise.known(again, arm))


def _levels(arm: str, sides: Sides, comparison: Comparison) -> Iterator[Level]:
    how = sides.how
    for row in comparison.rows:
        contrast = contrast_of(sides, row.key, how.metric)
        if contrast is None or row.estimate is None:
            why = "; ".join(reason.message for reason in row.reasons) or "no number"
            yield Level(arm=arm, key=row.key, before=None, now=None, within=None, certain=False, why=why)
            continue
        # Two one-sided tests at 5 %: equivalent to within x exactly when the 90 % interval lies within x.
        bounds = interval(contrast, 1 - 2 * (1 - how.confidence))
        farthest = max(abs(bounds.low), abs(bounds.high)) if bounds else abs(contrast.mean)
        estimate = row.estimate
        yield Level(
            arm=arm,
            key=row.key,
            before=estimate.base,
            now=estimate.treatment,
            within=math.expm1(farthest),
            certain=bounds is not None,
        )


def _changes(run: Run, again: Run, comparisons: Sequence[Comparison]) -> Iterator[Change]:
    """Machine facts that differ, each once, then what the servers said of themselves."""
    before, now = (comparable(one.facts().get("before", {})) for one in (run, again))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            yield Change(name=name, before=before.get(name), now=now.get(name))
    told: dict[str, Change] = {}
    for difference in (one for found in comparisons for one in found.fairness.differences):
        if difference.kind == "effective":
            change = Change(name=difference.name, before=difference.base, now=difference.treatment)
            told.setdefault(difference.name, change)
    yield from told.values()


def _answers(run: Run, again: Run) -> Iterator[str]:
    """Rows of the run's own comparison that have another verdict now."""
    before, now = _verdicts(run), _verdicts(again)
    for name, verdict in before.items():
        if name in now and now[name] != verdict:
            yield f"{name}: {verdict} before, {now[name]} now"


def _verdicts(run: Run) -> Mapping[str, str]:
    try:
        found = answer.stored(run)
    except HarnessError:
        return {}
    return {
        f"{comparison.treatment} against {comparison.base} at {row.key}": row.verdict
        for comparison in (found.comparisons if found else ())
        for row in comparison.rows
    }


def _apart(level: Level) -> str:
    if level.within is None or level.before is None or level.now is None:
        return f"{level.arm} {level.key}: {level.why}"
    change = level.now / level.before - 1
    known = f", known to within {level.within:.1%}" if level.certain else ""
    return f"{level.arm} {level.key} {change:+.1%}{known}"
