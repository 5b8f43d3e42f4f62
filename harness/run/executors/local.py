"""The local executor: one launch of the plan on this machine, from environment check to verified stop."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.engines import get as engine_of
from harness.engines import openai
from harness.engines.engine import Engine, Model, Server
from harness.env import build, guard, lock, places
from harness.errors import HarnessError, InputError, LockError, ServerError
from harness.files import sha256_file
from harness.load import prompts
from harness.recipe.plan import Plan, PlannedArm, PlannedCell, PlannedLaunch
from harness.recipe.site import Site
from harness.run import launch as launching
from harness.run import sweep
from harness.run.launch import Launched, Reached
from harness.run.store import Run, now
from harness.run.sweep import Bench, Tell


@dataclass(frozen=True, slots=True)
class Job:
    """What carrying out a plan needs beside the plan itself."""

    run: Run
    plan: Plan
    site: Site
    tell: Tell
    stop: threading.Event


@dataclass(frozen=True, slots=True)
class Environment:
    """The built environment an arm's server runs in; all None for an engine that needs none."""

    python: str | None = None
    site_packages: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    drift: tuple[str, ...] = ()


def environment(plan: Plan, arm: PlannedArm) -> Environment:
    """An arm's environment, built and unchanged since.

    Raises:
        LockError: not built, built from another lock, or drifted (unless the recipe allows drift, with a reason).
    """
    if arm.env is None:
        return Environment()
    locked = lock.read(places.lock_path(arm.env))
    if locked.env_id != arm.env_id:
        raise LockError(
            f"the lock of `{arm.env}` is not the one that was planned for",
            details=[f"planned {str(arm.env_id)[:16]}, now {locked.env_id[:16]}"],
            hint="plan again",
        )
    built = build.find(locked)
    if built is None:
        raise LockError(
            f"environment `{arm.env}` ({locked.env_id[:16]}) is not built here", hint=f"run `harness build {arm.env}`"
        )
    drift = tuple(str(change) for change in guard.check(built, locked))
    if drift and plan.allow_drift is None:
        raise LockError(
            f"environment `{arm.env}` differs from its lock",
            details=drift,
            hint=f"run `harness build {arm.env}` to make it anew, or say `allow_drift: REASON` in the recipe",
        )
    return Environment(str(built.python), built.site_packages, built.variables, drift)


def model(arm: PlannedArm, found: Environment, site: Site) -> Model | None:
    """An arm's model on this machine, its digest checked where the recipe gives one.

    Raises:
        InputError: it is not there, or not the one the recipe means.
    """
    if arm.model is None:
        return None
    if arm.model.from_env is not None:
        path = (found.site_packages or Path()) / arm.model.from_env
    else:
        text = arm.model.path or ""
        if unknown := site.unknown(text):
            names = ", ".join(f"`{name}`" for name in unknown)
            raise InputError(f"the model path `{text}` needs {names}", hint=f"say `variables:` in `{site.path}`")
        path = Path(site.expand(text)).expanduser()
    if not path.exists():
        raise InputError(
            f"there is no model at `{path}`", hint="`model.path` in the recipe, `variables` in the site file"
        )
    if arm.model.sha256 is not None and (seen := sha256_file(path)) != arm.model.sha256:
        raise InputError(f"`{path}` is not the model the recipe means: sha256 {seen[:16]}, not {arm.model.sha256[:16]}")
    return Model(str(path), arm.model.name)


def server_of(arm: PlannedArm, found: Environment, served: Model | None, site: Site) -> Server:
    """The server to start; in an argument `${MODEL}` is the model's own path, and other names are site facts.

    Raises:
        InputError: an argument names a site fact that this site does not know.
    """
    path = served.path if served else ""
    return Server(
        engine=arm.engine,
        host=arm.host,
        port=arm.port or 0,
        model=served,
        args={name: _filled(value, path, site) for name, value in arm.args.items()},
        variables={**found.variables, **arm.variables},
        python=found.python,
        unchecked=arm.unchecked,
    )


def carry_out(job: Job, planned: PlannedLaunch, cells: Sequence[PlannedCell]) -> list[str]:
    """Measure cells on one fresh server; returns what went wrong without ending the run.

    Raises:
        ServerError: the server failed and the plan says to stop.
        HarnessError: environment, model or port are not as planned.
    """
    remaining, troubles = list(cells), []
    while remaining and not job.stop.is_set():
        done, trouble = _one_server(job, planned, remaining)
        remaining = remaining[done:]
        if trouble is None:
            break
        if job.plan.on_failure == "stop":
            raise trouble
        troubles.append(trouble.message)
        if job.plan.on_failure == "relaunch-and-continue" and done == 0:
            raise trouble  # the same level killed a fresh server: going on would never end
    return troubles


def _one_server(job: Job, planned: PlannedLaunch, cells: Sequence[PlannedCell]) -> tuple[int, ServerError | None]:
    """Measure cells until they are done or the server is dead: how many were dealt with, and the death."""
    arm = job.plan.arms[planned.arm]
    engine = engine_of(arm.engine)
    found = environment(job.plan, arm)
    served = model(arm, found, job.site) or Model("", engine.name)
    with _live(job, planned, engine, server_of(arm, found, served if arm.model else None, job.site), found) as (
        live,
        answers,
    ):
        loaded = prompts.load(arm.workload["prompts"], beside=Path(job.plan.recipe_path).parent)
        if arm.model is None and (names := openai.model_names(live.models)):
            served = Model("", names[0])  # a server that was running already says itself what requests call its model
        bench = Bench(job.run, planned, arm, engine, served, live, answers, loaded, job.tell, job.stop)
        sweep.warm_up(bench)
        for index, cell in enumerate(cells):
            if job.stop.is_set():
                return index, None
            sweep.measure(bench, cell)
            if (death := live.death()) is not None:
                error = ServerError(
                    f"server `{engine.name}` died in `{planned.name}` at {cell.level.name}: {death.name}",
                    details=death.evidence,
                    hint=death.remedy,
                )
                return index + 1, error
    return len(cells), None


@contextmanager
def _live(
    job: Job, planned: PlannedLaunch, engine: Engine, server: Server, found: Environment
) -> Iterator[tuple[Launched, dict[str, Any]]]:
    """A ready server, recorded; on leaving it is stopped, and the stop is verified and recorded."""
    arm, folder = job.plan.arms[planned.arm], job.run.launch_folder(planned.name)
    job.tell("launch", launch=planned.name, text=f"starting {engine.name}{' (simulated)' if engine.simulated else ''}")
    job.run.event("launch", launch=planned.name, arm=planned.arm)
    record: dict[str, Any] = {"launch": planned.name, "arm": planned.arm, "block": planned.block, "started_at": now()}
    try:
        live = _bring_up(job, planned, engine, server, folder)
    except HarnessError as error:
        job.run.write_launch(planned.name, {**record, "failed": str(error), "drift": list(found.drift)})
        raise
    record |= {
        "ready_s": live.ready_s,
        "port": live.port,
        "argv": list(live.argv),
        "variables": dict(live.variables),
        "env": arm.env,
        "env_id": arm.env_id,
        "drift": list(found.drift),
        "milestones": [{"name": reached.name, "at_s": reached.at_s} for reached in live.milestones],
        "models": live.models,
    }
    answers = launching.answers(engine, live.server)
    record |= {"answers": answers, "effective": engine.effective(answers)}
    job.run.write_launch(planned.name, record)
    job.tell("launch", launch=planned.name, text=f"ready after {live.ready_s:.1f} s on port {live.port}")
    try:
        yield live, answers
    finally:
        report = live.stop()
        if report is not None:
            job.run.write_launch(planned.name, {**record, "stop": report.to_json()})
            gone = "nothing left" if report.ok else "; ".join(report.problems())
            job.tell("launch", launch=planned.name, text=f"stopped in {report.seconds:.1f} s, {gone}")
            if (left := report.error()) is not None:
                raise left


def _bring_up(job: Job, planned: PlannedLaunch, engine: Engine, server: Server, folder: Path) -> Launched:
    arm = job.plan.arms[planned.arm]

    def on_milestone(reached: Reached) -> None:
        job.tell("milestone", launch=planned.name, name=reached.name, seconds=reached.at_s)

    if arm.url is not None:
        where = urlsplit(arm.url)
        running = replace(server, host=where.hostname or arm.host, port=where.port or 80)
        log, dialect = folder / "server.log", arm.workload["dialect"]
        return launching.attach(engine, running, log=log, deadline_s=job.plan.start_timeout_s, dialect=dialect)
    return launching.launch(
        engine,
        server,
        folder=folder,
        deadline_s=job.plan.start_timeout_s,
        on_milestone=on_milestone,
        marker=f"{job.run.run_id}/{planned.name}",
        secrets=arm.secrets,
        dialect=arm.workload["dialect"],
    )


def _filled(value: Any, model_path: str, site: Site) -> Any:
    if isinstance(value, list):
        return [_filled(item, model_path, site) for item in value]
    if not isinstance(value, str):
        return value
    text = site.expand(value.replace("${MODEL}", model_path))
    if unknown := site.unknown(text):
        raise InputError(f"the argument `{value}` needs `{unknown[0]}`", hint=f"say `variables:` in `{site.path}`")
    return text
