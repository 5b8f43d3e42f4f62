"""Does the live environment still hold what its lock says? Asked before every run, so it must cost next to nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness import files
from harness.env import manifest, system_libraries
from harness.env.built import Built
from harness.env.locked import Lock

_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")


@dataclass(frozen=True, slots=True)
class Drift:
    """One way an environment differs from its lock: what, what the lock says, what is there (none: nothing)."""

    what: str
    locked: str | None
    live: str | None

    def __str__(self) -> str:
        return f"{self.what}: locked {self.locked or 'without it'}, live {self.live or 'nothing'}"


def check(built: Built, lock: Lock) -> list[Drift]:
    """Every difference between an environment and its lock; empty when there is none.

    Looked at: the manifest, the interpreter, the distributions' names and versions, the bytes of patched files, size
    and time of every other installed file against the list the build left, and whether the machine's libraries load.
    """
    made = manifest.read(built.path)
    if made is None:
        return [Drift("manifest", lock.env_id[:16], None)]
    if made.env_id != lock.env_id:
        return [Drift("env_id", lock.env_id[:16], made.env_id[:16])]
    if gone := list(_interpreter(built, made)):
        return gone
    return [
        *_versions(built, made),
        *_patched(built, lock),
        *_files(built, lock),
        *_libraries(built, lock, made),
    ]


def _interpreter(built: Built, made: manifest.Manifest) -> Iterator[Drift]:
    """The interpreter a venv points at may have been removed or upgraded under it."""
    if not built.python.exists():
        yield Drift("interpreter", made.python_version, None)
        return
    stated = dict(
        line.split(" = ", 1) for line in (built.path / "pyvenv.cfg").read_text().splitlines() if " = " in line
    )
    seen = stated.get("version_info", made.python_version)
    if seen != made.python_version:
        yield Drift("interpreter", made.python_version, seen)


def _versions(built: Built, made: manifest.Manifest) -> Iterator[Drift]:
    live = manifest.installed(built.site_packages)
    for name in sorted({*made.packages, *live}):
        if not _same(made.packages.get(name), live.get(name)):
            yield Drift(name, made.packages.get(name), live.get(name))


def _same(locked: str | None, live: str | None) -> bool:
    if locked is None or live is None:
        return locked == live
    try:
        return Version(locked) == Version(live)
    except InvalidVersion:
        return locked == live


def _patched(built: Built, lock: Lock) -> Iterator[Drift]:
    # Patches may share a target; what the last one leaves is what must be there.
    for name, sha256 in {target.path: target.after for patch in lock.patches for target in patch.targets}.items():
        live = _digest(built.site_packages / name)
        if live != sha256:
            yield Drift(f"patched file `{name}`", sha256[:12], live and live[:12])


def _digest(path: Path) -> str | None:
    try:
        return files.sha256_file(path)
    except OSError:
        return None


def _files(built: Built, lock: Lock) -> Iterator[Drift]:
    listed = manifest.listed(built.path)
    if listed is None:
        yield Drift("list of files", "there", None)
        return
    before, now = set(listed), set(manifest.listing(built.site_packages))
    old, new = manifest.sizes(before - now), manifest.sizes(now - before)
    patched = {target.path for patch in lock.patches for target in patch.targets}
    for name in sorted(old.keys() - patched):
        live = f"{new[name]} bytes, edited since" if name in new else None
        yield Drift(f"file `{name}`", f"{old[name]} bytes as built", live)
    # A file that appeared can change what is imported without touching any other: name those that Python runs at start.
    for name in sorted(new.keys() - old.keys()):
        if name.endswith(".pth") or name in ("sitecustomize.py", "usercustomize.py"):
            yield Drift(f"file `{name}`", None, f"{new[name]} bytes")


def _libraries(built: Built, lock: Lock, made: manifest.Manifest) -> Iterator[Drift]:
    """What loaded where it was built must still load; a GPU environment must find the driver, too."""
    asked = [name for name, loaded in made.system_libraries.items() if loaded or (lock.wanted.cuda and name in _DRIVER)]
    for name in system_libraries.unloadable(built.python, asked):
        yield Drift(f"system library `{name}`", "loadable", "cannot be loaded")
