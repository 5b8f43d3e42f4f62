"""Fill the wheelhouse from a lock: every file verified by sha256, in parallel, taking up where it left off.

Nightly builds leave their index after some weeks; a wheelhouse keeps what a lock names, and `build --offline` uses
it alone.
"""

import contextlib
import errno
import fcntl
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import requests
from urllib3.exceptions import HTTPError

from harness import files
from harness.env import indexes, simple_index
from harness.env.locked import Artefact, Lock, LockedPackage
from harness.env.spec import EnvSpec
from harness.errors import BuildError

_WORKERS = 6
_ATTEMPTS = 4
_PAUSE_S = 0.5
_BLOCK = 1 << 18
_TIMEOUT = 60.0
_SPARE_BYTES = 64 << 20


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
class Wanted:
    """One file to have: its package, what the lock says of it, and where it will lie."""

    package: LockedPackage
    artefact: Artefact
    path: Path


@dataclass(slots=True)
class _Work:
    spec: EnvSpec
    progress: Progress
    session: requests.Session
    stop: threading.Event = field(default_factory=threading.Event)


def wanted(lock: Lock, wheelhouse: Path, pythons: Sequence[str]) -> list[Wanted]:
    """The files a wheelhouse must hold for some Python versions, once each."""
    found = {
        artefact.file: Wanted(package, artefact, wheelhouse / artefact.file)
        for python in pythons
        for package, artefact in lock.selected(python)
    }
    return list(found.values())


def fetch(
    lock: Lock, spec: EnvSpec, wheelhouse: Path, pythons: Sequence[str] = (), progress: Progress | None = None
) -> list[Path]:
    """Have every file of a lock in the wheelhouse.

    Args:
        lock: what to have.
        spec: where its indexes are.
        wheelhouse: the folder to fill.
        pythons: for which Python versions, as `3.12`; all the lock covers when empty.
        progress: hears of it.

    Returns:
        The files, all verified.

    Raises:
        BuildError: something could not be had, or was not what the lock says; names every such file.
    """
    work = _Work(spec, progress or Silent(), requests.Session())
    try:
        wheelhouse.mkdir(parents=True, exist_ok=True)
        with locked(wheelhouse / ".lock", work.progress):
            want = wanted(lock, wheelhouse, pythons or lock.pythons)
            missing = [item for item in want if problem(item) is not None]
            _discard(missing, work.progress)
            _need_room(missing, wheelhouse)
            _download(missing, work)
    except OSError as error:
        raise BuildError(
            f"cannot fill the wheelhouse `{wheelhouse}`: {error.strerror}", hint=disk_hint(error)
        ) from error
    return [item.path for item in want]


def problem(item: Wanted) -> str | None:
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
    want = wanted(lock, wheelhouse, [python])
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


def _discard(missing: Sequence[Wanted], progress: Progress) -> None:
    for item in missing:
        if item.path.exists():
            progress.say(f"`{item.path.name}` {problem(item)}; removed, fetching it again")
            item.path.unlink()


def _need_room(missing: Sequence[Wanted], wheelhouse: Path) -> None:
    need = sum(item.artefact.size for item in missing)
    free = shutil.disk_usage(wheelhouse).free
    if missing and need + _SPARE_BYTES > free:
        raise BuildError(
            f"not enough room for the wheelhouse `{wheelhouse}`: {need >> 20} MiB to fetch, {free >> 20} MiB free",
            hint="free some space, or set `$HARNESS_HOME` to a larger disk",
        )


def _download(missing: Sequence[Wanted], work: _Work) -> None:
    work.progress.expect(sum(item.artefact.size for item in missing))
    with ThreadPoolExecutor(_WORKERS) as pool:
        futures = [pool.submit(_fetch_one, item, work) for item in missing]
        try:
            problems = [error for future in futures if isinstance(error := future.exception(), BuildError | OSError)]
            for future in futures:
                if future.exception() is not None and not isinstance(future.exception(), BuildError | OSError):
                    future.result()
        except BaseException:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if problems:
        raise _all_of(problems)


def _all_of(problems: Sequence[BuildError | OSError]) -> BuildError:
    texts = {problem.message if isinstance(problem, BuildError) else str(problem): problem for problem in problems}
    hints = [disk_hint(error) if isinstance(error, OSError) else error.hint for error in texts.values()]
    hint = next((hint for hint in hints if hint), None)
    if len(texts) == 1:
        return BuildError(next(iter(texts)), hint=hint)
    return BuildError(f"{len(texts)} files could not be fetched", details=list(texts)[:20], hint=hint)


def disk_hint(error: OSError) -> str | None:
    """What to do about an error of the file system."""
    if error.errno == errno.ENOSPC:
        return "free some space, or set `$HARNESS_HOME` to a larger disk"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "set `$HARNESS_HOME` to a folder you may write"
    return None


def _fetch_one(item: Wanted, work: _Work) -> None:
    partial = item.path.parent / ".partial" / f"{item.artefact.sha256[:16]}-{item.path.name}"
    partial.parent.mkdir(exist_ok=True)
    address = _address(item, work)
    try:
        _pour(address, partial, item, work)
        _accept(partial, item, work)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            partial.unlink(missing_ok=True)
        raise


def _address(item: Wanted, work: _Work) -> str:
    """Where the file is today: a folder of wheels on this machine, else its index."""
    for folder in indexes.wheel_folders():
        path = folder / item.path.name
        if path.is_file() and path.stat().st_size == item.artefact.size:
            return str(path)
    index = indexes.locate(item.package.index, work.spec.indexes, work.spec.folder)
    found = simple_index.addresses(index, item.package.name, work.session)
    if item.path.name not in found:
        raise BuildError(
            f"the index `{index.name}` no longer has `{item.path.name}`",
            hint="nightly builds leave their index; take the file from a wheelhouse that has it, or lock again",
        )
    return found[item.path.name]


def _pour(address: str, partial: Path, item: Wanted, work: _Work) -> None:
    """Copy or download, going on from what is there."""
    path = indexes.local_path(address)
    if path is not None:
        partial.unlink(missing_ok=True)
        with path.open("rb") as source, partial.open("wb") as target:
            _copy(iter(lambda: source.read(_BLOCK), b""), target, work)
        return
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _resume(address, partial, item, work)
        except (requests.RequestException, HTTPError) as error:
            if attempt == _ATTEMPTS:
                raise BuildError(f"`{item.path.name}` could not be downloaded: {type(error).__name__}") from error
            work.stop.wait(_PAUSE_S * attempt)
        else:
            return


def _resume(address: str, partial: Path, item: Wanted, work: _Work) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    if have > item.artefact.size:
        partial.unlink()
        have = 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    if have == item.artefact.size:
        work.progress.advance(have)
        return
    with work.session.get(address, headers=headers, stream=True, timeout=_TIMEOUT) as answer:
        if not answer.ok:
            raise BuildError(f"`{item.path.name}` could not be downloaded: HTTP {answer.status_code}")
        resumed = have > 0 and answer.status_code == requests.codes.partial_content
        work.progress.advance(have if resumed else 0)
        with partial.open("ab" if resumed else "wb") as target:
            # read1 gives what has come; a read of a whole block would lose it when the connection breaks.
            _copy(iter(lambda: answer.raw.read1(_BLOCK), b""), target, work)
    if (have := partial.stat().st_size) < item.artefact.size:
        raise requests.ConnectionError(f"the connection ended after {have} bytes")


def _copy(blocks: Iterator[bytes], target: IO[bytes], work: _Work) -> None:
    for block in blocks:
        if work.stop.is_set():
            raise BuildError("stopped")
        target.write(block)
        work.progress.advance(len(block))


def _accept(partial: Path, item: Wanted, work: _Work) -> None:
    wrong = problem(Wanted(item.package, item.artefact, partial))
    if wrong is None:
        partial.replace(item.path)
        return
    partial.unlink()
    raise BuildError(
        f"`{item.path.name}` from the index `{item.package.index}` {wrong}; removed",
        hint=f"the index serves another file than the one locked; if that is right, run `harness lock {work.spec.env}`",
    )
