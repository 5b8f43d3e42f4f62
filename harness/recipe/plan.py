"""The plan: every launch, level, prompt slice and identity of a run, decided before anything starts.

`make` is a function of values: the expanded recipe and the `Found` facts (lock identities, prompt digests, model
digests) in, a `Plan` out. The plan is one JSON file that any executor carries out unchanged.
"""

import fnmatch
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from harness import __version__
from harness.errors import Fault, InputError
from harness.files import digest
from harness.recipe import identity
from harness.recipe.expand import Arm, Expanded
from harness.recipe.schema import Compare, DocTarget, Profile, Sweep
from harness.stats.level import Stored

FORMAT = "harness.plan/1"
_REQUEST_BASE_S = 30.0  # what a request may take before its first token
_TOKEN_S = 1.0  # and per token: slower than the slowest published per-request rate (2.9 tok/s at C=250)
_ATTACH = "attach"


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """A prompt set as the plan needs it."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """What was looked up for a recipe: env_id by environment, facts by prompt set, model digests by arm."""

    environments: Mapping[str, str | None] = field(default_factory=dict)
    prompts: Mapping[str, PromptFacts] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, str | int | None]] = field(default_factory=dict)
    measurement: str = ""
    recipe_sha256: str = ""


class PlannedLevel(Stored):
    """One load level, with every number resolved."""

    name: str  # "c8", "r2.5", "serial"
    mode: Literal["closed", "open", "serial"]
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float | Literal["constant"] | None = None
    ramp_up_s: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 0
    drain: bool = False
    goodput: dict[str, float] | None = None
    profile: dict[str, float] | None = None  # traced for so many `seconds`, `after_s` of steady state
    request_timeout_s: float
    level_timeout_s: float

    @model_serializer(mode="wrap")
    def _as_ever(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a ramp, as before there were any: digests of plans and cells stay what they were."""
        said: dict[str, Any] = write(self)
        return {name: value for name, value in said.items() if name != "ramp_up_s" or value is not None}


class PlannedCell(Stored):
    """One level of one launch: the unit that is measured, stored, and reused."""

    cell_id: str
    level: PlannedLevel
    first_prompt: int
    prompts: int
    wrapped: bool = False
    identity: dict[str, Any]


class PlannedLaunch(Stored):
    """One server start and the cells measured on it, in order.

    With `shares` it is no start of its own: it goes on with the server of that launch, which differs only in what is
    asked. An executor that cannot keep a server may start a fresh one all the same.
    """

    name: str  # "01-baseline"
    arm: str
    block: int
    replicate: int
    first_prompt: int
    warmup_requests: int
    shares: str | None = None
    cells: tuple[PlannedCell, ...]


class PlannedModel(Stored):
    """Which model, and what identifies it."""

    path: str | None = None
    from_env: str | None = None
    name: str
    sha256: str | None = None
    family: str | None = None
    facts: dict[str, str | int | None] = {}


class PlannedArm(Stored):
    """One arm: everything its servers are started with and asked."""

    name: str
    env: str | None
    env_id: str | None
    engine: str
    args: dict[str, Any]
    unchecked: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    host: str
    nodes: int = 1
    port: int | None = None
    url: str | None = None
    ca_file: str | None = None
    insecure: bool = False
    model: PlannedModel | None = None
    workload: dict[str, Any]
    expect: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


class PlannedClient(Stored):
    """Where the load comes from: on the server's first machine or on others, from how many processes and machines."""

    node: Literal["head", "separate"] = "head"
    processes: int | None = None
    nodes: int = 1


class Finding(Stored):
    """Something worth knowing before the run: a rule that fires, a prompt set that wraps around."""

    severity: str
    id: str
    message: str
    where: str | None = None
    remedy: str | None = None
    source: str | None = None
    arms: tuple[str, ...] = ()  # what it is about; empty: the plan as a whole
    accepted: str | None = None  # why the recipe goes on all the same

    def __str__(self) -> str:
        return f"{self.severity}: {self.id}: {self.message}"


class Plan(Stored):
    """A whole run, decided."""

    format: str = FORMAT
    harness: str = __version__
    measurement: str
    recipe: str
    recipe_path: str
    recipe_sha256: str
    question: str
    arms: dict[str, PlannedArm]
    launches: tuple[PlannedLaunch, ...]
    client: PlannedClient = PlannedClient()
    compare: dict[str, Any] | None = None
    publish: tuple[dict[str, str], ...] = ()
    start_timeout_s: float
    run_timeout_s: float | None = None
    on_failure: str = "stop"
    stop_when_saturated: bool = False
    allow_drift: str | None = None
    findings: tuple[Finding, ...] = ()
    refine: dict[str, Any] | None = None
    refined: tuple[str, ...] = ()  # why each block after the first ones was added, as the run went

    @property
    def digest(self) -> str:
        """The plan's identity: sha256 of its canonical JSON, as it was before the run refined it."""
        blocks = 1 + max(launch.block for launch in self.launches) - len(self.refined)
        launches = tuple(launch for launch in self.launches if launch.block < blocks)
        first = self.model_copy(update={"launches": launches, "refined": ()})
        return digest(first.model_dump(mode="json"))

    def cells(self) -> Iterator[tuple[PlannedLaunch, PlannedCell]]:
        """Every cell with its launch, in the order they run."""
        for launch in self.launches:
            for cell in launch.cells:
                yield launch, cell


def make(expanded: Expanded, found: Found, findings: Sequence[Finding] = ()) -> Plan:
    """Decide a whole run.

    Raises:
        InputError: the arms differ in something the declared treatment does not name.
    """
    recipe = expanded.recipe
    arms = {arm.name: _arm(arm, expanded, found) for arm in expanded.arms}
    if recipe.compare:
        _check_treatment(expanded, recipe.compare)
        if recipe.compare.aa:
            base = arms[recipe.compare.base]
            arms = {base.name: base, f"{base.name}-again": base.model_copy(update={"name": f"{base.name}-again"})}
    launches = tuple(_launches(expanded, arms, found))
    return Plan(
        measurement=found.measurement,
        recipe=recipe.recipe,
        recipe_path=str(expanded.path),
        recipe_sha256=found.recipe_sha256,
        question=recipe.question,
        arms=arms,
        launches=launches,
        client=PlannedClient(**recipe.client.model_dump()),
        compare=_compare(recipe.compare, expanded),
        refine=recipe.refine.model_dump() | {"grid": sorted(recipe.sweep.concurrency or ())} if recipe.refine else None,
        publish=tuple(_target(target) for target in recipe.publish),
        start_timeout_s=recipe.timeouts.start_s,
        run_timeout_s=recipe.timeouts.run_s,
        on_failure=recipe.on_failure,
        stop_when_saturated=recipe.sweep.stop_when_saturated,
        allow_drift=recipe.allow_drift,
        findings=tuple(
            found.model_copy(update={"accepted": recipe.accept.get(found.id)})
            for found in (*findings, *_cautions(launches, arms))
        ),
    )


def _cautions(launches: Sequence[PlannedLaunch], arms: Mapping[str, PlannedArm]) -> Iterator[Finding]:
    """What a plan itself makes doubtful: too few requests for a level, too few prompts for a launch."""
    first = launches[0]
    few = [
        f"{cell.level.name} ({cell.level.requests} of {wanted})"
        for cell in first.cells
        if cell.level.requests and cell.level.requests < (wanted := max(30, 4 * (cell.level.concurrency or 1)))
    ]
    if few:
        message = (
            f"fewer requests than max(30, 4 x concurrency) at {', '.join(few)}: start and end of a level weigh much"
        )
        yield Finding(severity="warning", id="few-requests", message=message)
    if any(cell.wrapped for cell in first.cells):
        message = (
            f"launch `{first.name}` needs more prompts than `{arms[first.arm].workload['prompts']}` has;"
            " those used again carry a numbered first line, so that no prefix is cached"
        )
        yield Finding(severity="warning", id="prompts-wrap", message=message)


def scan(grid: Sequence[int]) -> list[int]:
    """The levels of a refined run's first block: every second one of the grid, and the last."""
    return sorted({*grid[::2], grid[-1]})


def treatment(overrides: Sequence[Sequence[str]], declared: Sequence[str]) -> list[str]:
    """Patterns of what arms may differ in: what the recipe declares, else what its arms set."""
    return list(declared) or sorted({path for paths in overrides for path in paths})


def _arm(arm: Arm, expanded: Expanded, found: Found) -> PlannedArm:
    setup = arm.setup
    model = None
    if setup.model:
        source = setup.model.path or setup.model.from_env or ""
        model = PlannedModel(
            path=setup.model.path,
            from_env=setup.model.from_env,
            name=setup.model.name or source.rstrip("/").rsplit("/", 1)[-1],
            sha256=setup.model.sha256,
            family=setup.model.family,
            facts=dict(found.models.get(arm.name, {})),
        )
    server = setup.server
    return PlannedArm(
        name=arm.name,
        env=setup.env,
        env_id=found.environments.get(setup.env) if setup.env else None,
        engine=server.engine,
        args=dict(server.args),
        unchecked=tuple(server.unchecked),
        variables=dict(server.variables),
        secrets=tuple(server.secrets),
        host=server.host,
        nodes=server.nodes,
        port=server.port,
        url=server.url,
        ca_file=server.ca_file,
        insecure=server.insecure,
        model=model,
        workload={**setup.workload.model_dump(), "prompts_sha256": found.prompts[setup.workload.prompts].sha256},
        expect=expanded.promised(arm),
        overrides=arm.overrides,
    )


def _launches(expanded: Expanded, arms: Mapping[str, PlannedArm], found: Found) -> Iterator[PlannedLaunch]:
    recipe = expanded.recipe
    order = blocks(list(arms), recipe.compare)
    grid = recipe.sweep.concurrency
    if recipe.refine:
        order, grid = order[:1], scan(sorted(grid or ()))
    number = prompt = 0
    for block, names in enumerate(order):
        launches = list(_block(expanded, [arms[name] for name in names], _At(block, number, prompt, grid), found))
        yield from launches
        number += len(launches)
        prompt = _next_prompt(launches)


def extend(plan: Plan, expanded: Expanded, found: Found, levels: Sequence[int], reason: str) -> Plan:
    """A plan with one more block of launches at the given concurrencies: what a run adds while it refines."""
    block = 1 + max(launch.block for launch in plan.launches)
    names = list(plan.arms) if block % 2 == 0 else list(plan.arms)[::-1]
    at = _At(block, len(plan.launches), _next_prompt(plan.launches), levels)
    more = _block(expanded, [plan.arms[name] for name in names], at, found)
    return plan.model_copy(update={"launches": (*plan.launches, *more), "refined": (*plan.refined, reason)})


@dataclass(frozen=True, slots=True)
class _At:
    """Where a block stands: its number, how many launches and prompts came before it, and its concurrencies."""

    block: int
    number: int
    prompt: int
    grid: Sequence[int] | None


def _block(expanded: Expanded, arms: Sequence[PlannedArm], at: _At, found: Found) -> Iterator[PlannedLaunch]:
    """One launch of each arm, all with the same prompts; those that share a server have theirs one after the other."""
    number = at.number
    for group in _by_server(arms) if expanded.recipe.share_launches else [[arm] for arm in arms]:
        head: PlannedLaunch | None = None
        here = at
        for arm in group:
            number += 1
            launch = PlannedLaunch(
                name=f"{number:02d}-{arm.name}",
                arm=arm.name,
                block=at.block,
                replicate=at.block,
                first_prompt=here.prompt,
                warmup_requests=expanded.recipe.warmup.requests,
                shares=head.name if head else None,
                cells=tuple(_cells(expanded, arm, here, found)),
            )
            yield launch
            head, here = head or launch, replace(at, prompt=_next_prompt([launch]))


def _by_server(arms: Sequence[PlannedArm]) -> list[list[PlannedArm]]:
    """Arms whose servers are started alike and asked differently, together; the base against itself stays apart."""
    groups: dict[str, list[PlannedArm]] = {}
    for arm in arms:
        server = digest(arm.model_dump(mode="json", exclude={"name", "workload", "expect", "overrides"}))
        if any(arm.workload == other.workload for other in groups.get(server, ())):
            server += arm.name
        groups.setdefault(server, []).append(arm)
    return list(groups.values())


def _next_prompt(launches: Sequence[PlannedLaunch]) -> int:
    """The first prompt that no launch has used."""
    return max(cell.first_prompt + cell.prompts for launch in launches for cell in launch.cells)


def blocks(arms: list[str], compare: Compare | None) -> list[list[str]]:
    """The order of launches: one list a block, each arm once in each. `abba` turns every second block around."""
    if compare is None:
        return [arms]
    if compare.order == "random":
        source = random.Random(compare.seed)
        return [source.sample(arms, len(arms)) for _ in range(compare.launches)]
    return [arms if block % 2 == 0 else arms[::-1] for block in range(compare.launches)]


def _cells(expanded: Expanded, arm: PlannedArm, at: _At, found: Found) -> Iterator[PlannedCell]:
    recipe = expanded.recipe
    size = found.prompts[arm.workload["prompts"]].size
    sweep = recipe.sweep.model_copy(update={"concurrency": list(at.grid) if at.grid else None})
    levels = [planned_level(level, expanded, arm) for level in sweep_levels(sweep)]
    if sweep.order == "shuffled":
        random.Random(f"{recipe.compare.seed if recipe.compare else 0}:{at.block}").shuffle(levels)
    start = at.prompt + recipe.warmup.requests
    for level in levels:
        count = (level.requests or size) + level.warmup_requests
        facts = cell_identity(arm, level, start, at.block, found.measurement)
        yield PlannedCell(
            cell_id=identity.cell_id(facts),
            level=level,
            first_prompt=start,
            prompts=count,
            wrapped=start + count - at.prompt > size,
            identity=facts,
        )
        start += count


def cell_identity(arm: PlannedArm, level: PlannedLevel, first: int, block: int, measurement: str) -> dict[str, Any]:
    """Everything that can move the numbers of one cell (design: section 3), ready for its sha256."""
    model = arm.model.model_dump(include={"path", "from_env", "name", "sha256", "facts"}) if arm.model else None
    spread = {"nodes": arm.nodes} if arm.nodes > 1 else {}
    aside = {"goodput", "request_timeout_s", "level_timeout_s"}  # they move no number
    if level.profile is None:
        aside.add("profile")
    return {
        "env_id": arm.env_id,
        "engine": arm.engine,
        **spread,
        "args": arm.args,
        "unchecked": list(arm.unchecked),
        "variables": arm.variables,
        "url": arm.url,
        "model": model,
        "workload": arm.workload,
        "level": level.model_dump(exclude=aside),
        "first_prompt": first,
        "replicate": block,
        "measurement": measurement,
    }


def sweep_levels(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The levels a sweep names, ascending; serial first, because it is the quietest."""
    if sweep.serial:
        yield {"name": "serial", "mode": "serial", "concurrency": 1, "requests": sweep.serial}
    for concurrency in sorted(sweep.concurrency or ()):
        default = None if sweep.duration_s else max(30, 4 * concurrency)
        yield {
            "name": f"c{concurrency}",
            "mode": "closed",
            "concurrency": concurrency,
            "ramp_up_s": sweep.ramp_up_s,
            "requests": sweep.requests or default,
            "duration_s": sweep.duration_s,
        }
    for rate in sorted(sweep.rate or ()):
        default = None if sweep.duration_s else max(30, math.ceil(4 * rate))
        yield {
            "name": f"r{rate!r}".removesuffix(".0"),
            "mode": "open",
            "rate": rate,
            "burstiness": sweep.burstiness,
            "requests": sweep.requests or default,
            "duration_s": sweep.duration_s,
        }


def planned_level(level: Mapping[str, Any], expanded: Expanded, arm: PlannedArm) -> PlannedLevel:
    """A level with its warm-up and its deadlines.

    A request may take 30 s and one second a token unless the recipe says otherwise; a level as many requests after
    one another as its fullest slot has, and one more.
    """
    recipe = expanded.recipe
    tokens = int(arm.workload["max_tokens"])
    request_s = recipe.timeouts.request_s or _REQUEST_BASE_S + _TOKEN_S * tokens
    head = recipe.warmup.level_requests
    warm = (level.get("concurrency") or 0) if head is None else head
    if level["mode"] == "serial":
        warm = 0
    rounds = math.ceil(((level["requests"] or 0) + warm) / (level.get("concurrency") or 1)) + 1
    spans = sum(level.get(name) or 0 for name in ("duration_s", "ramp_up_s"))
    level_s = recipe.timeouts.level_s or spans + request_s * rounds
    return PlannedLevel(
        **level,
        warmup_requests=warm,
        drain=recipe.warmup.drain,
        goodput=goodput.model_dump(exclude_none=True) if (goodput := recipe.sweep.goodput) else None,
        profile=_profile(recipe.profile, level["name"]),
        request_timeout_s=request_s,
        level_timeout_s=level_s,
    )


def _profile(wanted: Profile | None, level: str) -> dict[str, float] | None:
    if wanted is None or level not in wanted.levels:
        return None
    return {"after_s": wanted.after_s, "seconds": wanted.seconds}


def _check_treatment(expanded: Expanded, compare: Compare) -> None:
    """Two arms may differ only in the declared treatment; a difference it does not name is a fault of the recipe."""
    if not compare.treatment:
        return
    faults = [
        Fault(
            f"arm `{arm.name}` sets `{path}`, which `compare.treatment` does not name",
            arm.place(*path.split(".")),
            "name it in `compare.treatment`, or set it for all arms",
        )
        for arm in expanded.arms
        for path in arm.overrides
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in compare.treatment)
    ]
    if faults:
        raise InputError.of(faults)


def _compare(compare: Compare | None, expanded: Expanded) -> dict[str, Any] | None:
    if compare is None:
        return None
    patterns = treatment([arm.overrides for arm in expanded.arms], compare.treatment)
    return {**compare.model_dump(), "treatment": patterns}


def _target(target: DocTarget | str) -> dict[str, str]:
    return {"kind": target} if isinstance(target, str) else {"kind": "doc", "doc": target.doc, "block": target.block}
