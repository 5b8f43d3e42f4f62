"""From a stored run to its answer: the recipe's question, answered from what was measured.

Reads the run folder, turns it into the values that `stats` compares, and stores `comparison.json`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from harness.errors import InputError
from harness.files import write_json
from harness.load.records import RequestRecord
from harness.recipe import plan as planning
from harness.recipe.expand import corners_of
from harness.recipe.plan import Plan, PlannedArm
from harness.recipe.references import Reference
from harness.run import noise
from harness.run.facts import comparable
from harness.run.store import Run, read_stored
from harness.stats.arms import Arm, Launch, launch_of
from harness.stats.compare import Comparison, NoiseFloor, Settings, compare
from harness.stats.factorial import Factorial, effects
from harness.stats.fairness import Permission, flatten
from harness.stats.level import LevelResult, Reason, Stored
from harness.stats.policy import better_arm, kept_promise
from harness.stats.refine import Goal, Step, next_step
from harness.stats.slices import throughput
from harness.strict import suggest

FORMAT = "harness.answer/1"


class Promise(Stored):
    """Whether an adaptive arm is as good as the better of two fixed ones at every level; `broken` says where not."""

    arm: str
    of: str
    broken: tuple[Reason, ...]

    @property
    def sentence(self) -> str:
        """In a line."""
        if not self.broken:
            return f"`{self.arm}` is nowhere worse than the better of `{self.of}` and the base by more than the margin"
        return f"`{self.arm}` breaks its promise: " + "; ".join(reason.message for reason in self.broken)


class Answer(Stored):
    """Everything `comparison.json` says."""

    format: str = FORMAT
    run_id: str
    question: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()  # what was compared with what, and what was left out
    factorial: tuple[Factorial, ...] = ()
    promises: tuple[Promise, ...] = ()

    @property
    def sentence(self) -> str:
        """The answer in a line: each treatment's."""
        return "; ".join(f"{found.treatment} against {found.base}: {found.summary}" for found in self.comparisons)


def answer(run: Run) -> Answer | None:
    """Compare the arms of a stored run as its plan says; None when the plan compares nothing."""
    plan = run.plan()
    if plan.compare is None:
        return None
    return across([run])


class Asked(NamedTuple):
    """How arms are to be compared, where it is not as the first run's recipe says.

    Attributes:
        base: the base arm's name; default: the recipe's, else the first arm.
        margin: the equivalence margin; default: the recipe's, else 2 %.
        treatment: patterns of what may differ; default: what the recipe declares.
        pairs: arms by name, each of the first run with one of the others; of the one run where there is no other.
    """

    base: str | None = None
    margin: float | None = None
    treatment: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()


def across(runs: Sequence[Run], asked: Asked | None = None) -> Answer:
    """Compare within one run, or the arms of later runs against those of the first.

    Args:
        runs: stored runs. One: its arms against its base. Several: every arm that the first shares with another,
            each against its namesake; where they share none, the first's base against every arm of the others.
        asked: what to do otherwise.

    Raises:
        InputError: there is nothing to compare, or no such arm.
    """
    asked = asked or Asked()
    first, plan = runs[0], runs[0].plan()
    found = arms(first)
    how = {"treatment": permitted(plan), "accept": (), "margin": 0.02, **(plan.compare or {})}
    # Launches of one run that share a block ran next to each other; those of separate runs did not.
    how |= {"margin": asked.margin or how["margin"], "treatment": asked.treatment or how["treatment"]}
    how |= {"paired": _next_to_each_other(first, plan)}
    if len(runs) == 1 and not asked.pairs:
        base = _named(first, found, asked.base or base_of(first))
        return _answered(first, plan, base, [arm for arm in found.values() if arm.name != base.name], how)
    comparisons, notes = [], []
    for other in runs[1:] or runs:
        theirs = found if other is first else arms(other)
        chosen = pairs_of(first, list(found), other, list(theirs), asked)
        notes.append(_told(first, list(found), other, list(theirs), chosen))
        for mine, its in chosen:
            base, treatment = _named(first, found, mine), _named(other, theirs, its)
            if other is not first:
                treatment = replace(treatment, name=f"{its} ({other.run_id})")
            paired = other is first and how["paired"]
            settings = _settings({**how, "paired": paired}, noise.known(first, plan.arms[mine]))
            comparisons.append(compare(base, treatment, settings))
    return Answer(run_id=first.run_id, question=plan.question, comparisons=tuple(comparisons), notes=tuple(notes))


def with_published(sides: Sequence[Reference | Run], asked: Asked) -> tuple[list[Comparison], list[str]]:
    """Runs and published tables against the first of them, by whole-run throughput: a table tells no other.

    Args:
        sides: both kinds, in the order asked for.
        asked: a run's base arm, and which arms of later runs; default: the namesake of the table's arm, else every one.

    Returns:
        The comparisons, and what is to be said about them.

    Raises:
        InputError: a run has no such arm.
    """
    first, *others = sides
    base = _sides(first, asked, None)[0]
    wanted = first.arm if isinstance(first, Reference) else None
    permission = Permission(tuple(asked.treatment))
    margin = asked.margin or Settings().margin
    settings = Settings(metric="output_tok_s_whole", margin=margin, paired=False, permission=permission)
    comparisons = [compare(base, arm, settings) for other in others for arm in _sides(other, asked, wanted)]
    notes = ["whole-run throughput is compared, from first send to last byte, which is what published tables tell"]
    for table in sides:
        if isinstance(table, Reference):
            told = f"`{table.reference}` was measured on {table.hardware} with {table.model}"
            notes.append(f"{told}; whether a run had the same is not checked")
    return comparisons, notes


def _sides(side: Reference | Run, asked: Asked, wanted: str | None) -> list[Arm]:
    """The arms that one side brings: a table its own, the first run its base, another run those wanted."""
    if isinstance(side, Reference):
        return [side.as_arm(side.reference)]
    found = arms(side)
    if asked.pairs:
        names = [its for _, its in asked.pairs]
    elif asked.base or wanted is None:
        names = [asked.base or base_of(side)]
    else:
        names = [wanted] if wanted in found else list(found)
    return [replace(_named(side, found, name), name=f"{name} ({side.run_id})") for name in names]


def base_of(run: Run) -> str:
    """The name of a run's base arm: its recipe's, else the first."""
    plan = run.plan()
    return str((plan.compare or {}).get("base") or next(iter(plan.arms)))


def pairs_of(first: Run, mine: Sequence[str], other: Run, theirs: Sequence[str], asked: Asked) -> list[tuple[str, str]]:
    """Which arm of the first run is compared with which of another."""
    if asked.pairs:
        return list(asked.pairs)
    base = asked.base or base_of(first)
    if asked.base is not None:
        return [(base, base)] if base in theirs else [(base, name) for name in theirs]
    shared = [(name, name) for name in mine if name in theirs]
    return shared or [(base, name) for name in theirs]


def _named(run: Run, found: Mapping[str, Arm], name: str) -> Arm:
    if name not in found:
        raise InputError(f"run `{run.run_id}` has no arm `{name}`", hint=suggest(name, found))
    return found[name]


def _told(first: Run, mine: Sequence[str], other: Run, theirs: Sequence[str], chosen: Sequence[tuple[str, str]]) -> str:
    """What is compared with what, and which arms are not."""
    said = ", ".join(f"`{one}`" if one == its else f"`{one}` with `{its}`" for one, its in chosen)
    where = f"{first.run_id} against {other.run_id}" if other is not first else f"within {first.run_id}"
    used = {(first.run_id, one) for one, _ in chosen} | {(other.run_id, its) for _, its in chosen}
    there = dict.fromkeys([*((first.run_id, name) for name in mine), *((other.run_id, name) for name in theirs)])
    left = [f"`{name}` of {run_id}" for run_id, name in there if (run_id, name) not in used]
    return f"compared: {said}, {where}" + (f"; left out: {', '.join(left)}" if left else "")


def refining(run: Run, plan: Plan) -> Callable[[Plan], Step]:
    """What to run next, from what the run has measured so far; for a plan that refines."""
    began = time.monotonic()
    how, asked = plan.compare or {}, plan.refine or {}
    goal = Goal(grid=asked["grid"], width=asked["width"], blocks=asked["blocks"], minutes=asked["minutes"])

    def decide(_: Plan) -> Step:
        found = arms(run)
        base = found[how["base"]]
        [other] = [arm for name, arm in found.items() if name != base.name]
        permission = Permission(tuple(how["treatment"]), tuple(how["accept"]))
        settings = Settings(margin=how["margin"], permission=permission)
        return next_step(base, other, goal, settings, (time.monotonic() - began) / 60)

    return decide


def stored(run: Run) -> Answer | None:
    """The answer a run stored, None where it has none (yet)."""
    path = run.path / "comparison.json"
    return read_stored(Answer, path) if path.is_file() else None


def _answered(run: Run, plan: Plan, base: Arm, others: Sequence[Arm], how: Mapping[str, Any]) -> Answer:
    if not others:
        raise InputError(
            f"run `{run.run_id}` has one arm, `{base.name}`: nothing to compare",
            hint="name a second run, or add an arm",
        )
    aa = bool((plan.compare or {}).get("aa"))
    settings = _settings(how, None if aa else noise.known(run, plan.arms[base.name]))
    if aa:
        noise.keep(run, base, others[0], settings)
    return _compared(run, plan, base, others, settings)


def _settings(how: Mapping[str, Any], floor: NoiseFloor | None) -> Settings:
    permission = Permission(tuple(how["treatment"]), tuple(how["accept"]))
    return Settings(margin=how["margin"], paired=how.get("paired", True), permission=permission, noise=floor)


def derived(run: Run, known: Answer) -> Answer | None:
    """A run's answer made anew from its files, by the noise floor of the answer it stored; changes nothing.

    Returns:
        None when the plan compares nothing.
    """
    plan = run.plan()
    if plan.compare is None:
        return None
    found = arms(run)
    base = found[plan.compare["base"]]
    others = [arm for arm in found.values() if arm.name != base.name]
    floor = next((comparison.noise for comparison in known.comparisons), None)
    return _compared(run, plan, base, others, _settings(plan.compare, floor))


def _compared(run: Run, plan: Plan, base: Arm, others: Sequence[Arm], settings: Settings) -> Answer:
    return Answer(
        run_id=run.run_id,
        question=plan.question,
        comparisons=tuple(compare(base, other, settings) for other in others),
        factorial=tuple(_factorial(plan, {arm.name: arm for arm in (base, *others)})),
        promises=tuple(_promises(plan, {arm.name: arm for arm in (base, *others)}, base, settings)),
    )


def _factorial(plan: Plan, found: Mapping[str, Arm]) -> Iterator[Factorial]:
    """Main effects and interaction at every level that all four arms have."""
    factors = (plan.compare or {}).get("factors") or {}
    corners = corners_of(factors)
    if corners is None or any(name not in found for name in corners.values()):
        return
    first, second = factors
    four = {levels: found[name] for levels, name in corners.items()}
    shared = set.intersection(*(set(arm.level_keys()) for arm in four.values()))
    for key in next(iter(four.values())).level_keys():
        if key in shared and (effect := effects(four, (first, second), key)) is not None:
            yield effect


def _promises(plan: Plan, found: Mapping[str, Arm], base: Arm, settings: Settings) -> Iterator[Promise]:
    for name, treatment in ((plan.compare or {}).get("promise") or {}).items():
        if name not in found or treatment not in found:
            continue
        better = better_arm(base, found[treatment], compare(base, found[treatment], settings))
        broken = kept_promise(compare(better, found[name], settings), settings.margin)
        yield Promise(arm=name, of=treatment, broken=broken)


def store(run: Run, found: Answer) -> None:
    """Write `comparison.json`, and each treatment's policy as a file that a machine can read."""
    files = {"comparison.json": found.model_dump(mode="json")}
    for comparison in found.comparisons:
        if comparison.policy is not None:
            files[f"policy-{comparison.treatment}.json"] = comparison.policy.model_dump(mode="json")
    for name, value in files.items():
        write_json(run.path / name, value, mode=0o600)
        run.note(run.path / name)


def arms(run: Run) -> dict[str, Arm]:
    """The arms of a stored run, with every finished level."""
    plan = run.plan()
    facts = comparable(run.facts().get("before", {}))
    results = list(run.levels())
    found = {}
    for name, planned in plan.arms.items():
        mine = [launch.name for launch in plan.launches if launch.arm == name]
        launches = [_launch(run, launch, results, facts, planned) for launch in mine]
        found[name] = Arm(
            name=name,
            launches=tuple(launch for launch in launches if launch is not None),
            plan=planned_facts(planned),
            simulated=any(result.simulated for _, result in results if result.arm == name),
        )
    return found


def planned_facts(arm: PlannedArm) -> dict[str, Any]:
    """What was planned for an arm, flattened under the names a recipe uses."""
    facts = {
        "env": arm.env,
        "server": {
            "engine": arm.engine,
            "args": arm.args,
            "unchecked": list(arm.unchecked),
            "variables": arm.variables,
        },
        "model": arm.model.model_dump(exclude={"facts"}) if arm.model else None,
        "workload": arm.workload,
    }
    return flatten(facts)


def permitted(plan: Plan) -> list[str]:
    """The patterns of what may differ between the arms of a plan."""
    declared = plan.compare["treatment"] if plan.compare else ()
    return planning.treatment([arm.overrides for arm in plan.arms.values()], declared)


def _next_to_each_other(run: Run, plan: Plan) -> bool:
    """Whether the launches of each block ran on the same machines; on a cluster a recipe may let them go elsewhere."""
    places: dict[int, set[str]] = {}
    for launch in plan.launches:
        if node := run.launch(launch.name).get("node"):
            places.setdefault(launch.block, set()).add(node["nodes"] or node["name"])
    return all(len(where) == 1 for where in places.values())


def _launch(
    run: Run, name: str, results: list[tuple[str, LevelResult]], facts: Mapping[str, Any], planned: PlannedArm
) -> Launch | None:
    levels = [result for launch, result in results if launch == name]
    if not levels:
        return None
    records: dict[str, list[RequestRecord]] = {
        str(result.level["name"]): list(run.requests(name, str(result.level["name"]))) for result in levels
    }
    said = run.launch(name)
    facts = comparable(said["facts"]) if said.get("facts") else facts  # on a cluster each launch has its own machine
    return launch_of(
        levels,
        effective=said.get("effective") or {},
        facts={**facts, "env_id": planned.env_id, "measurement": levels[0].measurement, "counter": levels[0].counter},
        records=records,
        slicer=throughput,
    )
