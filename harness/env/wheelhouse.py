"""The wheelhouse: a folder that holds the files locks name, each checked before it is used."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness import files
from harness.env.locked import Artefact, Lock, LockedPackage
from harness.errors import BuildError


class Progress(Protocol):
    """What hears of a fetch or a build as it goes."""

    def say(self, text: str) -> None:
        """One line about the step that begins."""

    def expect(self, amount: int) -> None:
        """So many bytes will be fetched."""

    def advance(self, amount: int) -> None:
        """So many bytes more have come."""


class Silent:
    """Hears nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def expect(self, amount: int) -> None:
        """Nothing."""

    def advance(self, amount: int) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Needed:
    """One file to have: its package, what the lock says of it, and where it will lie."""

    package: LockedPackage
    artefact: Artefact
    path: Path


def needed(lock: Lock, wheelhouse: Path, pythons: Sequence[str]) -> list[Needed]:
    """The files a wheelhouse must hold for some Python versions, once each."""
    found = {
        artefact.file: Needed(package, artefact, wheelhouse / artefact.file)
        for python in pythons
        for package, artefact in lock.selected(python)
    }
    return list(found.values())


def problem(item: Needed) -> str | None:
    """Why a wheelhouse file cannot be used: it is missing, of another size, or of another sha256."""
    if not item.path.is_file():
        return "is missing"
    if (size := item.path.stat().st_size) != item.artefact.size:
        return f"has {size} bytes, the lock says {item.artefact.size}"
    if (sha256 := files.sha256_file(item.path)) != item.artefact.sha256:
        return f"has sha256 {sha256[:12]}..., the lock says {item.artefact.sha256[:12]}..."
    return None


def verify(lock: Lock, wheelhouse: Path, python: str) -> list[Path]:
    """The wheelhouse's files for one Python version, each checked; wrong files are removed.

    Raises:
        BuildError: names every file that is missing or was wrong.
    """
    want = needed(lock, wheelhouse, [python])
    problems = {item: found for item in want if (found := problem(item)) is not None}
    for item in problems:
        item.path.unlink(missing_ok=True)
    if problems:
        details = [
            f"`{item.path.name}` {found}" + ("" if found == "is missing" else "; removed")
            for item, found in problems.items()
        ]
        raise BuildError(
            f"the wheelhouse `{wheelhouse}` does not hold what the lock `{lock.name}` names",
            details=details[:20],
            hint=f"run `harness fetch {lock.name}` where the indexes can be reached",
        )
    return [item.path for item in want]


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file: a second process waits for the first. The system lets go of it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another harness at the same work")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def disk_hint(error: OSError) -> str | None:
    """What to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return "free some space, or set `$HARNESS_HOME` to a larger disk"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "set `$HARNESS_HOME` to a folder you may write"
    return None
