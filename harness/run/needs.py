"""What a plan needs of this machine, looked for before anything starts: environments, models, `preflight`'s list."""

from collections.abc import Iterator
from pathlib import Path

from harness.engines import get as engine_of
from harness.env import lock, places
from harness.env.spec import Cuda
from harness.errors import HarnessError, InputError, LockError
from harness.recipe.plan import Plan, PlannedArm
from harness.recipe.site import Site
from harness.run import preflight
from harness.run.executors import local
from harness.run.preflight import Need, Trouble

_REQUEST_BYTES = 64 << 10  # what one stored request takes at most, chunks included, for the disk estimate


def before(plan: Plan, site: Site, out: Path, *, wait_s: float = 0.0) -> list[Trouble]:
    """Everything wrong at once, before anything starts; returns what is only worth knowing.

    Raises:
        LockError: an environment is not built, or not what its lock says.
        InputError: a model, a port, the disk or another need is not met.
    """
    errors: list[HarnessError] = []
    troubles: list[Trouble] = []
    for arm in _distinct(plan):
        try:
            need = _need(plan, arm, site, out)
        except HarnessError as error:
            errors.append(error)
            continue
        found = preflight.wait_free(need, wait_s) if wait_s else preflight.check(need)
        troubles += [trouble for trouble in found if trouble not in troubles]
    if errors:
        raise _together(errors)
    preflight.refuse(troubles)
    return [trouble for trouble in troubles if not trouble.fatal]


def _distinct(plan: Plan) -> Iterator[PlannedArm]:
    """Arms that need something of this machine: those that start a server."""
    yield from (arm for arm in plan.arms.values() if arm.url is None)


def _need(plan: Plan, arm: PlannedArm, site: Site, out: Path) -> Need:
    found = local.environment(plan, arm)
    served = local.model(arm, found, site)
    cells = [cell.level for launch, cell in plan.cells() if launch.arm == arm.name]
    requests = sum(level.requests or 0 for _, cell in plan.cells() for level in [cell.level])
    cuda = _cuda(arm)
    return Need(
        run_folder=out,
        host=arm.host,
        port=arm.port,
        concurrency=max((level.concurrency or 1 for level in cells), default=1),
        model=Path(served.path) if served else None,
        run_bytes=max(64 << 20, requests * _REQUEST_BYTES),
        gpus=gpus(arm) // arm.nodes,
        driver=cuda.driver.lstrip(">=") if cuda else None,
        variables=dict(arm.variables),
    )


def gpus(arm: PlannedArm) -> int:
    """How many GPUs an arm's server spans: tensor times pipeline parallelism, in either spelling; 0 without CUDA.

    Raises:
        LockError: its environment is not locked.
    """
    if _cuda(arm) is None or engine_of(arm.engine).simulated:
        return 0
    sizes = [arm.args.get(short) or arm.args.get(long) or 1 for short, long in _PARALLEL]
    return int(sizes[0]) * int(sizes[1])


def _cuda(arm: PlannedArm) -> Cuda | None:
    return lock.read(places.lock_path(arm.env)).wanted.cuda if arm.env else None


_PARALLEL = (("tp", "tensor-parallel-size"), ("pp", "pipeline-parallel-size"))


def _together(errors: list[HarnessError]) -> HarnessError:
    """Several errors as one of the same kind; equal ones once, a lock's before an input's."""
    unique = list({str(error): error for error in errors}.values())
    if len(unique) == 1:
        return unique[0]
    kind = LockError if any(isinstance(error, LockError) for error in unique) else InputError
    details = [line for error in unique for line in (error.message, *(f"  {detail}" for detail in error.details))]
    hints = "; ".join(dict.fromkeys(error.hint for error in unique if error.hint))
    return kind(f"{len(unique)} needs are not met", details=details, hint=hints or None)
