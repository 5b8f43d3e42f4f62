"""Where a report's numbers come from: identities, digests, commands, what machine and servers said of themselves."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from harness.env import lock, places
from harness.env.locked import Lock
from harness.errors import HarnessError
from harness.publish.report.shown import Shown
from harness.recipe.plan import Plan, PlannedArm, PlannedModel
from harness.run import inputs
from harness.stats.fairness import flatten


class Fact(NamedTuple):
    """One line of provenance."""

    name: str
    value: str


class Block(NamedTuple):
    """A longer text to read or copy."""

    title: str
    text: str


def facts(one: Shown) -> list[Fact]:
    """Who made these numbers, of what, where and when."""
    if one.plan is None:
        reference = one.published
        found = reference.model_dump(exclude={"levels"}, exclude_none=True) if reference else {}
        return [Fact(name, str(value)) for name, value in found.items()]
    return [*_run(one, one.plan), *_machine(one.facts or {}), *_arms(one, one.plan)]


def reproduce(one: Shown) -> str:
    """Commands that do it again; empty for a published table."""
    if one.plan is None:
        return ""
    git = (one.facts or {}).get("git") or {}
    lines = []
    if commit := git.get("commit"):
        lines.append(f"git checkout {commit}")
        if git.get("dirty"):
            lines[-1] += f"  # not all of it: {git.get('changed')} files were changed and not committed"
    lines.append("python3 -m pip install -e .")
    environments = sorted({arm.env for arm in one.plan.arms.values() if arm.env})
    lines += [f"harness build {shlex.quote(name)}" for name in environments]
    return "\n".join([*lines, f"harness run {shlex.quote(one.plan.recipe_path)}"])


def blocks(one: Shown) -> Iterator[Block]:
    """Server commands, what servers said, cells, and the machine in full."""
    shown: set[str] = set()
    for launch in one.launches:
        if not launch.record or launch.arm in shown:
            continue
        shown.add(launch.arm)
        record = launch.record
        if argv := record.get("argv"):
            yield Block(f"Server of {launch.arm}: command", shlex.join(argv))
        if variables := record.get("variables"):
            lines = [f"{name}={value}" for name, value in sorted(variables.items())]
            yield Block(f"Server of {launch.arm}: variables", "\n".join(lines))
        if effective := record.get("effective"):
            yield Block(f"Server of {launch.arm}: configuration by its own account", _listing(effective))
    starts = [text for launch in one.launches if (text := _start(launch.name, launch.record))]
    if starts:
        yield Block("Starts: seconds from process to milestone", "\n".join(starts))
    cells = [f"{level.launch} {level.label}: {level.result.cell_id}" for level in one.levels() if level.result]
    if cells:
        yield Block("Cell identities", "\n".join(cells))
    if one.facts:
        yield Block("Machine, before the run", _listing(one.facts))


def _run(one: Shown, plan: Plan) -> Iterator[Fact]:
    record = one.record or {}
    yield Fact("run", one.name)
    yield Fact("recipe", f"{plan.recipe_path} (sha256 {plan.recipe_sha256[:16]})")
    yield Fact("plan", plan.digest)
    yield Fact("harness", f"{plan.harness}, definitions {plan.measurement}")
    if began := record.get("started"):
        yield Fact("started, ended", f"{began}, {record.get('ended') or 'not ended'}")
    git = (one.facts or {}).get("git") or {}
    if commit := git.get("commit"):
        yield Fact("commit", commit + (f", with {git.get('changed')} files changed" if git.get("dirty") else ""))
    counters = sorted({level.result.counter for level in one.levels() if level.result and level.result.counter})
    if counters:
        yield Fact("tokens counted by", ", ".join(counters))
    if plan.refined:
        yield Fact("blocks added while it ran", "; ".join(plan.refined))


def _machine(known: Mapping[str, Any]) -> Iterator[Fact]:
    cpu, system, gpu = known.get("cpu") or {}, known.get("system") or {}, known.get("gpu")
    if cpu:
        yield Fact("CPU", f"{cpu.get('model')}, {cpu.get('usable')} usable")
    if isinstance(gpu, dict):
        names = [str(device.get("name")) for device in gpu.get("devices", [])]
        kinds = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
        yield Fact("GPU", f"{kinds or 'none'}, driver {gpu.get('driver')}")
    elif gpu:
        yield Fact("GPU", str(gpu))
    if system:
        yield Fact("system", f"{system.get('kernel')}, {system.get('distribution')}")


def _arms(one: Shown, plan: Plan) -> Iterator[Fact]:
    """What each arm was; what all arms share, once."""
    for name, arm in plan.arms.items():
        yield Fact(f"arm {name}", _engine(arm))
    shared: dict[Fact, list[str]] = {}
    for name, arm in plan.arms.items():
        for fact in _inputs(one, arm):
            shared.setdefault(fact, []).append(name)
    for fact, names in shared.items():
        whose = "" if len(names) == len(plan.arms) else f" of {', '.join(names)}"
        yield Fact(f"{fact.name}{whose}", fact.value)


def _engine(arm: PlannedArm) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in arm.args.items())
    where = f" at {arm.url}" if arm.url else ""
    expects = f"; expected to engage: {', '.join(arm.expect)}" if arm.expect else ""
    return f"{arm.engine}{where}{f' ({settings})' if settings else ''}{expects}"


def _inputs(one: Shown, arm: PlannedArm) -> Iterator[Fact]:
    if arm.env:
        yield Fact("environment", f"{arm.env}, env_id {arm.env_id}")
        yield Fact("patches", _patches(one, arm.env, str(arm.env_id)))
    if arm.model:
        yield Fact("model", _model(arm.model))
    work = arm.workload
    yield Fact("prompts", f"{work.get('prompts')}, sha256 {work.get('prompts_sha256')}")


def _model(model: PlannedModel) -> str:
    digests = "; ".join(f"{key} {value}" for key, value in model.facts.items() if value is not None)
    where = f"{model.from_env} of the environment" if model.from_env else str(model.path)
    sha256 = f"sha256 {model.sha256}" if model.sha256 else ""
    return ", ".join(part for part in (model.name, where, sha256, digests) if part)


def _patches(one: Shown, env: str, env_id: str) -> str:
    locked = _lock(one, env, env_id)
    if locked is None:
        return "not known here: the lock with this env_id is not at hand"
    found = [f"{patch.name} (sha256 {patch.sha256[:16]}, {len(patch.targets)} files)" for patch in locked.patches]
    return "; ".join(found) or "none"


def _lock(one: Shown, env: str, env_id: str) -> Lock | None:
    """The lock that an environment was built from, known by its digest: another one says nothing about this run."""
    copy = inputs.lock(one.run, env) if one.run else None
    try:
        found = lock.read(copy or places.lock_path(env))
    except HarnessError:
        return None
    return found if found.env_id == env_id else None


def _start(name: str, record: Mapping[str, Any]) -> str:
    steps = [f"{one.get('name')} {one.get('at_s'):g}" for one in record.get("milestones") or ()]
    if record.get("ready_s") is not None:
        steps.append(f"ready {record['ready_s']:g}")
    return f"{name}: {', '.join(steps)}" if steps else ""


def _listing(values: Mapping[str, Any]) -> str:
    """Nested values, a line each."""
    return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in flatten(values).items())
