"""Fill the wheelhouse from a lock: every file verified by sha256, in parallel, taking up where it left off.

Nightly builds leave their index after some weeks; a wheelhouse keeps what a lock names, and `build --offline` uses
it alone.
"""

import errno
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import requests
from urllib3.exceptions import HTTPError

from harness.env import indexes, simple_index
from harness.env.locked import Lock
from harness.env.spec import EnvSpec
from harness.env.wheelhouse import Needed, Progress, Silent, disk_hint, locked, needed, problem
from harness.errors import BuildError

_WORKERS = 6
_ATTEMPTS = 4
_PAUSE_S = 0.5
_BLOCK = 1 << 18
_TIMEOUT = 60.0
_SPARE_BYTES = 64 << 20


@dataclass(slots=True)
class _Work:
    spec: EnvSpec
    progress: Progress
    session: requests.Session
    stop: threading.Event = field(default_factory=threading.Event)


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
            want = needed(lock, wheelhouse, pythons or lock.pythons)
            missing = [item for item in want if problem(item) is not None]
            _discard(missing, work.progress)
            _need_room(missing, wheelhouse)
            _download(missing, work)
    except OSError as error:
        raise BuildError(
            f"cannot fill the wheelhouse `{wheelhouse}`: {error.strerror}", hint=disk_hint(error)
        ) from error
    return [item.path for item in want]


def _discard(missing: Sequence[Needed], progress: Progress) -> None:
    for item in missing:
        if item.path.exists():
            progress.say(f"`{item.path.name}` {problem(item)}; removed, fetching it again")
            item.path.unlink()


def _need_room(missing: Sequence[Needed], wheelhouse: Path) -> None:
    need = sum(item.artefact.size for item in missing)
    free = shutil.disk_usage(wheelhouse).free
    if missing and need + _SPARE_BYTES > free:
        raise BuildError(
            f"not enough room for the wheelhouse `{wheelhouse}`: {need >> 20} MiB to fetch, {free >> 20} MiB free",
            hint="free some space, or set `$HARNESS_HOME` to a larger disk",
        )


def _download(missing: Sequence[Needed], work: _Work) -> None:
    work.progress.expect(sum(item.artefact.size for item in missing))
    with ThreadPoolExecutor(_WORKERS) as pool:
        futures = [pool.submit(_fetch_one, item, work) for item in missing]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    problems = [error for error in errors if isinstance(error, BuildError | OSError)]
    if unforeseen := [error for error in errors if error not in problems]:
        raise unforeseen[0]
    if problems:
        raise _all_of(problems)


def _all_of(problems: Sequence[BuildError | OSError]) -> BuildError:
    texts = {problem.message if isinstance(problem, BuildError) else str(problem): problem for problem in problems}
    hints = [disk_hint(error) if isinstance(error, OSError) else error.hint for error in texts.values()]
    hint = next((hint for hint in hints if hint), None)
    if len(texts) == 1:
        return BuildError(next(iter(texts)), hint=hint)
    return BuildError(f"{len(texts)} files could not be fetched", details=list(texts)[:20], hint=hint)


def _fetch_one(item: Needed, work: _Work) -> None:
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


def _address(item: Needed, work: _Work) -> str:
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


def _pour(address: str, partial: Path, item: Needed, work: _Work) -> None:
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


def _resume(address: str, partial: Path, item: Needed, work: _Work) -> None:
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


def _accept(partial: Path, item: Needed, work: _Work) -> None:
    wrong = problem(Needed(item.package, item.artefact, partial))
    if wrong is None:
        partial.replace(item.path)
        return
    partial.unlink()
    raise BuildError(
        f"`{item.path.name}` from the index `{item.package.index}` {wrong}; removed",
        hint=f"the index serves another file than the one locked; if that is right, run `harness lock {work.spec.env}`",
    )
