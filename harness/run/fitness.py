"""Which environments of a project this machine can build and run, and why not the others."""

from dataclasses import dataclass

from harness.env import build, interpreter, lock, places
from harness.env.locked import Lock
from harness.env.spec import Cuda
from harness.errors import BuildError, HarnessError
from harness.run import gpu


@dataclass(frozen=True, slots=True)
class Fit:
    """One environment here. `builds`, `runs`: whether it can be built and can serve; `why` tells what is in the way.

    `built`: it is there already. `size`: bytes of its wheels, None without a lock.
    """

    spec: str
    builds: bool
    runs: bool
    built: bool
    why: tuple[str, ...] = ()
    size: int | None = None


def all_here() -> list[Fit]:
    """Every environment of the project, by name.

    Raises:
        InputError: there is no project here.
    """
    driver, devices = gpu.driver(), gpu.gpus()
    here = Machine(driver[0] if driver else None, tuple(one.capability for one in devices if one.capability))
    return [fit(name, here) for name in places.spec_names()]


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides: the driver's version, and each GPU's compute capability."""

    driver: str | None
    capabilities: tuple[tuple[int, int], ...]


def fit(name: str, here: Machine) -> Fit:
    """One environment, by its spec's name, on a machine."""
    path = places.lock_path(name)
    if not path.is_file():
        return Fit(name, False, False, False, ("no lock: `harness lock` says which index could not be reached",))
    try:
        locked = lock.read(path)
        interpreter.check_platform(locked.wanted.platform)
    except HarnessError as error:
        return Fit(name, False, False, False, (error.message,))
    built, why = build.find(locked) is not None, list(_python(locked))
    lacking = list(_cuda(locked.wanted.cuda, here)) if locked.wanted.cuda else []
    size = sum(file.size for package in locked.packages for file in package.files)
    return Fit(name, built or not why, (built or not why) and not lacking, built, (*why, *lacking), size)


def _python(locked: Lock) -> list[str]:
    try:
        interpreter.choose(locked, None)
    except BuildError as error:
        return [error.message]
    return []


def _cuda(cuda: Cuda, here: Machine) -> list[str]:
    """Why an environment's servers would not come up on this machine's GPUs."""
    if here.driver is None:
        return ["no NVIDIA GPU here"]
    found = []
    floor = cuda.driver.lstrip(">= ").split(",")[0]
    if _numbers(here.driver) < _numbers(floor):
        found.append(f"driver {here.driver}, it needs {cuda.driver}")
    covered = {name.removeprefix("sm_").rstrip("af") for name in cuda.arch}
    missing = sorted({f"{major}.{minor}" for major, minor in here.capabilities if f"{major}{minor}" not in covered})
    if missing:
        found.append(f"built for {', '.join(cuda.arch)}, this GPU is {', '.join(missing)}")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
