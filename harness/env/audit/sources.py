"""From a lock and a wheelhouse, from a built environment, or from wheel files alone, to what is audited."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.env.audit.distributions import Absent, Source, Wheel, installed
from harness.env.locked import Artefact, Lock, LockedPackage
from harness.errors import Fault, InputError


def from_lock(lock: Lock, wheelhouse: Path, python: str) -> Source:
    """The wheels of a lock that a wheelhouse holds; the rest is named as absent.

    Raises:
        InputError: a wheel has not the size the lock says; all of them at once.
    """
    present: list[Wheel] = []
    absent: list[Absent] = []
    faults: list[Fault] = []
    for package, artefact in lock.selected(python):
        path = wheelhouse / artefact.file
        if not path.is_file() or not artefact.file.endswith(".whl"):
            absent.append(_absent(package, artefact))
        elif (size := path.stat().st_size) != artefact.size:
            faults.append(Fault(f"`{path}` has {size} bytes, the lock says {artefact.size}"))
        else:
            present.append(Wheel(str(canonicalize_name(package.name)), package.version, path))
    if faults:
        raise InputError.of(
            faults, hint=f"run `harness fetch {lock.name}`: it takes away damaged files and gets them again"
        )
    return Source(lock.name, tuple(present), (*absent, *_overlays(lock)), env_id=lock.env_id, toolkit=toolkit(lock))


def from_environment(lock: Lock, site_packages: Path) -> Source:
    """A built environment. Patched files are held to what the lock's patches leave, all others to their RECORD."""
    patched = {target.path: target.after for patch in lock.patches for target in patch.targets}
    return Source(lock.name, installed(site_packages), env_id=lock.env_id, toolkit=toolkit(lock), patched=patched)


def from_wheels(paths: Sequence[Path]) -> Source:
    """Some wheel files by themselves, as if they were installed together: a part of an environment."""
    missing = [Fault(f"there is no file `{path}`") for path in paths if not path.is_file()]
    if missing:
        raise InputError.of(missing)
    return Source(" ".join(path.name for path in paths), tuple(map(Wheel.at, paths)), complete=False)


def needed(lock: Lock, python: str) -> tuple[LockedPackage, ...]:
    """The packages whose wheels an audit must open: those made for one platform. NVIDIA's own libraries are left out:
    what they bring is judged by their names and versions, and they are most of the bytes."""
    return tuple(
        package
        for package, artefact in lock.selected(python)
        if artefact.file.endswith(".whl")
        and not artefact.file.endswith("-any.whl")
        and not package.name.startswith("nvidia-")
    )


def toolkit(lock: Lock) -> str | None:
    """The CUDA toolkit of the base image."""
    return lock.wanted.cuda.toolkit if lock.wanted.cuda else None


def _absent(package: LockedPackage, artefact: Artefact) -> Absent:
    binary = artefact.file.endswith(".whl") and not artefact.file.endswith("-any.whl")
    return Absent(str(canonicalize_name(package.name)), package.version, artefact.file, artefact.size, binary)


def _overlays(lock: Lock) -> Iterator[Absent]:
    """Folders of ours that a build lays over: Python source only."""
    for overlay in lock.overlays:
        yield Absent(str(canonicalize_name(overlay.name)), overlay.version, overlay.overlay, 0, binary=False)
