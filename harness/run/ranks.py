"""A rank above 0 of a server that spans machines: what a node agent runs beside the one that measures.

Run as `python -m harness.run.ranks RUN LAUNCH RANK NODES`, or called as `serve`. It meets rank 0 through the run's
folder (`harness.run.rendezvous`), checks environment and model as rank 0 does, starts its part of the server below the
same supervisor, tells rank 0 of its end, and stops it, verified, when rank 0 says so or is heard no more. Such a part
answers no requests, so nothing is asked of it: rank 0 is not ready without it, and speaks for it too.
"""

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engines import get as engine_of
from harness.engines.engine import Rank, Server, StopPolicy
from harness.errors import HarnessError, InputError
from harness.recipe.plan import Plan, PlannedArm
from harness.recipe.site import Site
from harness.recipe.site import load as load_site
from harness.run import clients, diagnose, logs, ports, privacy, rendezvous, supervise
from harness.run.executors import local
from harness.run.launch import Launched
from harness.run.rendezvous import SILENT_S, Follower
from harness.run.run import interruptible
from harness.run.signatures import GENERIC
from harness.run.store import Run, open_run
from harness.run.supervise import AT_ONCE, StopReport

LOST = 5  # as the errors of a server that failed
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs of this machine for a server and for a load's worker beside it; empty: all that we may use."""

    server: tuple[int, ...] = ()
    client: tuple[int, ...] = ()


_ALL = Cpus()


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank starts, and who tells it to end."""

    run: Run
    launch: str
    arm: PlannedArm
    server: Server
    stop: threading.Event


def serve(  # noqa: PLR0913 - the last three by name
    run: Run,
    plan: Plan,
    launch_name: str,
    rank: int,
    nodes: int,
    *,
    site: Site | None = None,
    stop: threading.Event | None = None,
    cpus: Cpus = _ALL,
    silent_s: float = SILENT_S,
) -> int:
    """Be one machine of a launch for as long as rank 0 measures it, through every server it starts for that.

    A machine from `nodes` on runs no server. Where the plan says so, a machine offers load, with or without a server.

    Args:
        run: the run's folder, on a file system that every machine sees.
        plan: its plan.
        launch_name: the launch.
        rank: which machine this is, from 1.
        nodes: how many the server spans.
        site: site facts; by default this machine's.
        stop: when set, what runs here is stopped and this returns.
        cpus: those that the server and the load's worker may run on.
        silent_s: rank 0 is given up when nothing has been heard of it for so long.

    Returns:
        0 when rank 0 sent us home and everything started here is verified gone; else the exit code of what went wrong,
        which rank 0 has been told.
    """
    stop = stop or threading.Event()
    arm = plan.arms[next(planned.arm for planned in plan.launches if planned.name == launch_name)]
    if rank >= nodes:
        return clients.offer(run, launch_name, plan.start_timeout_s, stop)
    with ExitStack() as beside:
        if clients.offers(plan, arm, rank):
            place = clients.contact(run, launch_name)
            beside.enter_context(clients.worker(place, plan.start_timeout_s, cpus.client))
        follower = Follower(run.launch_folder(launch_name), rank, nodes, silent_s=silent_s)
        with follower:
            if not _met(follower, stop, plan.start_timeout_s):
                _say(rank, f"rank 0 of `{launch_name}` was not heard within {plan.start_timeout_s:.0f} s")
                return LOST
            try:
                server = replace(_server(plan, arm, site or load_site()), port=0, cpus=cpus.server)
            except HarnessError as error:
                return _refuse(follower, error, stop)
            return _serve(Part(run, launch_name, arm, server, stop), follower)


def _server(plan: Plan, arm: PlannedArm, site: Site) -> Server:
    """This machine's server, environment and model checked here as rank 0 checks its own."""
    found = local.environment(plan, arm)
    return local.server_of(arm, found, local.model(arm, found, site), site)


def _met(follower: Follower, stop: threading.Event, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while not follower.met():
        if time.monotonic() >= until or stop.wait(_LOOK_S):
            return False
    return True


def _refuse(follower: Follower, error: HarnessError, stop: threading.Event) -> int:
    """Tell rank 0 what is wrong here at every call, until it gives up."""
    _say(follower.rank, str(error))
    follower.refused(error)
    while not (follower.over or follower.abandoned or stop.wait(_LOOK_S)):
        follower.dismissed()
        if follower.called() is not None:
            follower.refused(error)
    return error.exit_code


def _serve(part: Part, follower: Follower) -> int:
    """One server after the other, as rank 0 calls for them."""
    worst = 0
    while not (follower.over or part.stop.wait(_LOOK_S)):
        if follower.abandoned:
            _say(follower.rank, "nothing is heard of rank 0 any more")
            return LOST
        follower.dismissed()
        if (rank := follower.called()) is not None:
            worst = max(worst, _one_server(part, follower, rank))
    return worst


def _one_server(part: Part, follower: Follower, rank: Rank) -> int:
    try:
        launched = _start(part, follower, rank)
    except HarnessError as error:
        _say(rank.rank, str(error))
        follower.refused(error)
        return error.exit_code
    code = 0
    try:
        _say(rank.rank, f"started, meets rank 0 at {rank.address}")
        if _died(part, follower, launched):
            code = LOST
    finally:
        report = _stop(follower, launched)
    return code if report.ok else LOST


def _start(part: Part, follower: Follower, rank: Rank) -> Launched:
    """This rank's process, below a supervisor of its own; every rank takes a port that is free on its machine."""
    engine = engine_of(part.arm.engine)
    free = replace(part.server, port=ports.choose_port(part.server.host, None))
    server = rendezvous.placed(engine, free, rank)
    command = engine.command(server)
    command = replace(command, argv=(*command.argv, *server.unchecked), cpus=server.cpus)
    log = follower.folder / f"rank-{rank.rank}" / "server.log"
    began = log.stat().st_size if log.exists() else 0
    process = supervise.start(
        command,
        log=log,
        marker=f"{part.run.run_id}/{part.launch}",
        cwd=privacy.private_folder(log.parent),
        host=server.host,
        listens_on=[server.port],
        secrets=part.arm.secrets,
    )
    hidden = privacy.secret_values(part.arm.secrets, process.variables)
    follower.running(
        pid=process.pid,
        port=server.port,
        argv=privacy.redact_argv(command.argv, hidden),
        variables=privacy.redact_variables(command.variables, hidden),
        cpus=list(server.cpus),
        log=str(log.relative_to(part.run.path)),
    )
    return Launched(engine, server, process, log, 0.0, log_offset=began, oom_kills=diagnose.oom_kills())


def _died(part: Part, follower: Follower, launched: Launched) -> bool:
    """Watch until it is to be stopped; a death is told to rank 0 at once, which then says stop."""
    tail, signatures = logs.LogTail(launched.log, launched.log_offset), (*launched.engine.signatures, *GENERIC)
    lines: list[logs.LogLine] = []
    dead = False
    while not (part.stop.is_set() or follower.ordered_to_stop or follower.abandoned):
        fresh = tail.fresh()
        lines += fresh
        if not dead and (launched.is_dead() or diagnose.decisive(fresh, signatures)):
            found = launched.death() or diagnose.explain(
                lines, launched.engine.signatures, diagnose.Death(None, "measure")
            )
            # Rank 0 may have said stop meanwhile: a group ends together, and the order is slower than the group.
            if follower.ordered_to_stop:
                break
            follower.dead(found)
            _say(follower.rank, f"the server here is dead: {found}")
            dead = True
        time.sleep(_LOOK_S)
    return dead or (follower.abandoned and not part.stop.is_set())


def _stop(follower: Follower, launched: Launched) -> StopReport:
    policy: StopPolicy | None = AT_ONCE if follower.urgent or follower.abandoned else None
    report = launched.stop(policy)
    assert report is not None
    follower.stopped(report)
    _say(follower.rank, f"stopped in {report.seconds:.1f} s, {'; '.join(report.problems()) or 'nothing left'}")
    return report


def _say(rank: int, text: str) -> None:
    sys.stderr.write(f"[rank {rank}] {text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The program."""
    command = argparse.ArgumentParser(prog="harness.run.ranks", description=str(__doc__).split("\n", maxsplit=1)[0])
    command.add_argument("run", type=Path)
    command.add_argument("launch")
    command.add_argument("rank", type=int)
    command.add_argument("nodes", type=int)
    arguments = command.parse_args(argv)
    stop = threading.Event()
    try:
        run = open_run(arguments.run)
        if arguments.rank < 1:
            raise InputError(f"rank {arguments.rank} is none above 0")
        with interruptible(stop, lambda kind, **facts: _say(arguments.rank, f"{kind}: {facts.get('text', '')}")):
            return serve(run, run.plan(), arguments.launch, arguments.rank, arguments.nodes, stop=stop)
    except HarnessError as error:
        _say(arguments.rank, str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
