"""The local executor: one launch of the plan on this machine, from environment check to verified stop."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from harness.engines import attach, openai
from harness.engines import get as engine_of
from harness.engines.engine import Engine, Model, Server, Tls
from harness.errors import HarnessError, InputError, LockError, ServerError
from harness.files import sha256_file
from harness.load import prompts
from harness.load.capacity import Capacities
from harness.load.client import Load
from harness.load.distributed import Workers
from harness.recipe.plan import Plan, PlannedArm, PlannedCell, PlannedLaunch, PlannedLevel
from harness.recipe.site import Site
from harness.run import clients, privacy, sweep
from harness.run import launch as launching
from harness.run.diagnose import Diagnosis
from harness.run.launch import Launched, Reached
from harness.run.rendezvous import Head
from harness.run.store import Run, now
from harness.run.supervise import AT_ONCE
from harness.run.sweep import Bench, Tell


@dataclass(frozen=True, slots=True)
class Job:
    """What carrying out a plan needs beside the plan itself."""

    run: Run
    plan: Plan
    site: Site
    tell: Tell
    stop: threading.Event  # the user said stop
    deadline: float = math.inf  # when the run must end, by the monotonic clock
    capacities: Capacities = field(default_factory=Capacities)  # of the load client, found out as levels need them
    node: Mapping[str, Any] = field(default_factory=dict)  # what the record says about where this runs
    server_cpus: tuple[int, ...] = ()  # those that servers may run on; empty: all that we may use
    ranks: Head | None = None  # the other machines of a server that spans several; `carry_out` gathers them
    workers: Workers | None = None  # the machines that offer the load, where that is not this one; gathered likewise
    kept: "Kept | None" = None  # keeps a server for the launches that share it; None: every launch starts its own


@dataclass(frozen=True, slots=True)
class Environment:
    """The built environment an arm's server runs in; all None for an engine that needs none."""

    python: str | None = None
    site_packages: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    drift: tuple[str, ...] = ()
    python_version: str | None = None  # a lock may span several; the record says which one it was


def environment(plan: Plan, arm: PlannedArm) -> Environment:
    """An arm's environment, built and unchanged since.

    Raises:
        LockError: not built, built from another lock, or drifted (unless the recipe allows drift, with a reason).
    """
    if arm.env is None:
        return Environment()
    # A quarter of a second, which a sweep over a server that runs already need not wait for.
    from harness.env import build, guard, lock, places  # noqa: PLC0415

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
    return Environment(str(built.python), built.site_packages, built.variables, drift, built.python_version)


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
    nodes, apart = job.plan.arms[planned.arm].nodes, clients.apart(job.plan)
    if (nodes > 1 or apart) and not job.node:
        spans = f"a server of `{planned.arm}` spans {nodes} machines"
        wanted = spans if nodes > 1 else f"the load of `{planned.arm}` comes from other machines"
        raise InputError(f"{wanted}, and this is one", hint="run it on a cluster: `harness run RECIPE --on slurm`")
    with ExitStack() as others:
        if nodes > 1:
            job = replace(job, ranks=others.enter_context(Head(job.run.launch_folder(planned.name), nodes)))
        if apart:
            gathering = clients.gathered(job.run, job.plan, planned.name, job.stop)
            job = replace(job, workers=others.enter_context(gathering))
        return _measured(job, planned, cells)


def _measured(job: Job, planned: PlannedLaunch, cells: Sequence[PlannedCell]) -> list[str]:
    remaining, troubles = list(cells), []
    relaunched_for: PlannedCell | None = None
    while remaining and not job.stop.is_set():
        done, trouble = _one_server(job, planned, remaining)
        if trouble is None:
            break
        if job.plan.on_failure == "stop":
            raise trouble
        troubles.append(trouble.message)
        fatal, remaining = remaining[done - 1], remaining[done:]
        if job.plan.on_failure == "relaunch-and-continue" and fatal is not relaunched_for:
            relaunched_for = fatal  # once: a level that kills every server would be tried for ever
            remaining = [fatal, *remaining]
    return troubles


def _one_server(job: Job, planned: PlannedLaunch, cells: Sequence[PlannedCell]) -> tuple[int, ServerError | None]:
    """Measure cells until they are done or the server is dead: how many were dealt with, and the death."""
    arm = job.plan.arms[planned.arm]
    loaded = prompts.load(arm.workload["prompts"], beside=Path(job.plan.recipe_path).parent)
    _calibrate(job, planned, [cell.level for cell in cells])
    with _served(job, planned) as live:
        names = openai.model_names(live.server.models)
        # A server that was running already says itself what requests call its model.
        called = live.server.server.model or Model("", names[0] if names else live.engine.name)
        bench = Bench(
            job.run,
            planned,
            arm,
            live.engine,
            called,
            live.server,
            live.answers,
            loaded,
            job.tell,
            job.stop,
            job.deadline,
            job.capacities,
            processes=job.plan.client.processes,
            workers=job.workers,
        )
        sweep.warm_up(bench)
        for index, cell in enumerate(cells):
            if job.stop.is_set():
                return index, None
            if _saturated(job, planned):
                break
            sweep.measure(bench, cell)
            if (death := live.server.death()) is not None:
                return index + 1, _died(live.engine, planned, cell, death)
    return len(cells), None


def _calibrate(job: Job, planned: PlannedLaunch, levels: Sequence[PlannedLevel]) -> None:
    """Find out what the client can read here, before a server takes its share of the machine."""
    if job.workers is None:
        processes = job.plan.client.processes
        loads = [Load(mode=each.mode, concurrency=each.concurrency, processes=processes) for each in levels]
        for said in job.capacities.before(loads):
            _say(job, planned, said)


def _saturated(job: Job, planned: PlannedLaunch) -> bool:
    """Whether this launch's levels so far show that higher ones would only queue; asked for by the plan."""
    if not job.plan.stop_when_saturated:
        return False
    from harness.stats.saturation import exhausted  # noqa: PLC0415 - few sweeps ask

    levels = [job.run.level(planned.name, cell.level.name) for cell in planned.cells]
    done = [result for result in levels if result is not None]
    # An open loop that outran the server says so itself; closed loops show it from level to level.
    outrun = [reason.message for result in done for reason in result.verdict.reasons if reason.code == "overloaded"]
    points = [
        (int(result.level["concurrency"]), result.throughput.output_tok_s, result.metrics["ttft_s"].mean)
        for result in done
        if result.level["mode"] == "closed" and result.verdict.state != "invalid" and "ttft_s" in result.metrics
    ]
    found = exhausted([(at, speed, ttft) for at, speed, ttft in points if speed is not None and ttft is not None])
    message = outrun[0] if outrun else found.message if found.overloaded else None
    if message is not None:
        job.run.event("saturated", launch=planned.name, message=message)
        _say(job, planned, f"{message}; higher levels are left out")
    return message is not None


def _died(engine: Engine, planned: PlannedLaunch, cell: PlannedCell, death: Diagnosis) -> ServerError:
    return ServerError(
        f"server `{engine.name}` died in `{planned.name}` at {cell.level.name}: {death}",
        details=death.evidence,
        hint=death.remedy,
    )


@dataclass(frozen=True, slots=True)
class _Live:
    """A ready server, what it said of itself, and the engine it turned out to be."""

    server: Launched
    engine: Engine
    answers: Mapping[str, Any]


class Kept:
    """A server that lives on from one launch to those that share it. Leaving it as a context stops what is left."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._head: str | None = None  # of the launches that share it
        self._started_for: str | None = None  # the launch whose record says how
        self._live: _Live | None = None

    def __enter__(self) -> "Kept":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack, self._head, self._live = self._stack, ExitStack(), None, None
        stack.__exit__(kind, error, trace)

    def make_room(self, planned: PlannedLaunch) -> None:
        """Stop the server of earlier launches unless this one goes on with it.

        Raises:
            ServerError: something of it is left.
        """
        if self._head is not None and _head(planned) != self._head:
            self.__exit__(None, None, None)

    def serve(self, job: Job, planned: PlannedLaunch) -> _Live:
        """The server that the launches of this head share: the one that lives, else a fresh one."""
        if self._live is None or self._live.server.is_dead():
            self.__exit__(None, None, None)
            self._live = self._stack.enter_context(_live(job, planned))
            self._head, self._started_for = _head(planned), planned.name
            return self._live
        record = job.run.launch(self._started_for or "")
        own = {"launch": planned.name, "arm": planned.arm, "started_at": now(), "shares": self._started_for}
        job.run.event("launch", launch=planned.name, arm=planned.arm, shares=self._started_for)
        job.run.write_launch(planned.name, {**record, **own})
        _say(job, planned, f"goes on with the server of {self._started_for}")
        return self._live


def _head(planned: PlannedLaunch) -> str:
    """The launch whose server this one is measured on."""
    return planned.shares or planned.name


@contextmanager
def _served(job: Job, planned: PlannedLaunch) -> Iterator[_Live]:
    """A ready server: kept for the launches that share it, or of this launch alone and stopped with it."""
    heads = {launch.shares for launch in job.plan.launches}
    if job.kept is None or not (planned.shares or planned.name in heads):
        with _live(job, planned) as live:
            yield live
        return
    yield job.kept.serve(job, planned)


@contextmanager
def _live(job: Job, planned: PlannedLaunch) -> Iterator[_Live]:
    """A ready server, recorded; on leaving it is stopped, and the stop is verified and recorded."""
    arm = job.plan.arms[planned.arm]
    engine, found = engine_of(arm.engine), environment(job.plan, arm)
    server = replace(server_of(arm, found, model(arm, found, job.site), job.site), cpus=job.server_cpus)
    if job.workers is not None and arm.url is None and launching.is_loopback(server.host):
        server = replace(server, host="::" if ":" in job.workers.address else "0.0.0.0")  # others ask it too
    _say(job, planned, f"starting {_label(engine)}")
    job.run.event("launch", launch=planned.name, arm=planned.arm)
    record: dict[str, Any] = {
        "launch": planned.name,
        "arm": planned.arm,
        "block": planned.block,
        "started_at": now(),
        "env": arm.env,
        "env_id": arm.env_id,
        "python": found.python_version,
        "drift": list(found.drift),
        **job.node,
    }
    try:
        launched = _bring_up(job, planned, engine, server)
    except HarnessError as error:
        job.run.write_launch(planned.name, {**record, "failed": str(error)})
        raise
    try:
        live = _asked(launched, engine)
        record |= _told(live)
        job.run.write_launch(planned.name, record)
        _say(job, planned, f"{_label(live.engine)} is ready after {launched.ready_s:.1f} s on port {launched.port}")
        yield live
    except KeyboardInterrupt:
        launched.stop(AT_ONCE)
        raise
    finally:
        _stop(job, planned, launched, record)


def _asked(launched: Launched, engine: Engine) -> _Live:
    """What a ready server says of itself; one that was running already may turn out to be an engine we know."""
    answers = privacy.redact_json(launching.answers(engine, launched.server), launched.secrets)
    if launched.process is None:
        engine = attach.recognised(answers)
    return _Live(launched, engine, answers)


def _told(live: _Live) -> dict[str, Any]:
    launched = live.server
    return {
        "engine": live.engine.name,
        "simulated": live.engine.simulated,
        "ready_s": launched.ready_s,
        "port": launched.port,
        "argv": list(launched.argv),
        "variables": dict(launched.variables),
        "withheld": list(launched.withheld),
        "milestones": [{"name": reached.name, "at_s": reached.at_s} for reached in launched.milestones],
        "models": launched.models,
        "answers": dict(live.answers),
        "effective": live.engine.effective(live.answers),
        **({"ranks": launched.ranks.facts()} if launched.ranks else {}),
    }


def _stop(job: Job, planned: PlannedLaunch, launched: Launched, record: Mapping[str, Any]) -> None:
    """Stop a server of ours and prove that nothing is left.

    Raises:
        ServerError: something is.
    """
    try:
        report = launched.stop()
    finally:  # an interrupt stops it all the same, and says so afterwards
        if launched.process and launched.process.report:
            job.run.write_launch(planned.name, {**record, "stop": launched.process.report.to_json()})
    if report is None:
        return
    _say(job, planned, f"stopped in {report.seconds:.1f} s, {'; '.join(report.problems()) or 'nothing left'}")
    if (left := report.error()) is not None:
        raise left


def _say(job: Job, planned: PlannedLaunch, text: str) -> None:
    job.tell("launch", launch=planned.name, text=text)


def _label(engine: Engine) -> str:
    return f"{engine.name}, which measures nothing" if engine.simulated else engine.name


def _bring_up(job: Job, planned: PlannedLaunch, engine: Engine, server: Server) -> Launched:
    arm, folder = job.plan.arms[planned.arm], job.run.launch_folder(planned.name)

    def on_milestone(reached: Reached) -> None:
        job.tell("milestone", launch=planned.name, name=reached.name, seconds=reached.at_s)

    if arm.url is not None:
        running = _running(arm, server, Path(job.plan.recipe_path).parent)
        log, dialect = folder / "server.log", arm.workload["dialect"]
        patience = job.plan.start_timeout_s
        return launching.attach(engine, running, log=log, deadline_s=patience, dialect=dialect, stop=job.stop)
    return launching.launch(
        engine,
        server,
        folder=folder,
        deadline_s=job.plan.start_timeout_s,
        on_milestone=on_milestone,
        marker=f"{job.run.run_id}/{planned.name}",
        secrets=arm.secrets,
        dialect=arm.workload["dialect"],
        stop=job.stop,
        ranks=job.ranks,
    )


def _running(arm: PlannedArm, server: Server, beside: Path) -> Server:
    """Where a server that runs already is, and how it is trusted; its `ca_file` is looked for beside the recipe.

    Raises:
        InputError: there is no such file.
    """
    where = urlsplit(arm.url or "")
    tls = None
    if where.scheme == "https":
        ca_file = None if arm.ca_file is None else beside / arm.ca_file
        if ca_file is not None and not ca_file.is_file():
            raise InputError(f"there is no file `{ca_file}`", hint="`server.ca_file` names the authority's certificate")
        tls = Tls(None if ca_file is None else str(ca_file), arm.insecure)
    return replace(server, host=where.hostname or arm.host, port=where.port or (443 if tls else 80), tls=tls)


def _filled(value: Any, model_path: str, site: Site) -> Any:
    if isinstance(value, list):
        return [_filled(item, model_path, site) for item in value]
    if not isinstance(value, str):
        return value
    text = site.expand(value.replace("${MODEL}", model_path))
    if unknown := site.unknown(text):
        raise InputError(f"the argument `{value}` needs `{unknown[0]}`", hint=f"say `variables:` in `{site.path}`")
    return text
