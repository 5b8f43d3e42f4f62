"""Holding a file as long as a context lasts, across processes and, on a file system that has locks, across machines.

The kernel lets go when the process dies, however it dies; a network file system when it gives its client up.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import InputError

_LOOK_S = 0.2


@contextmanager
def hold(path: Path, *, shared: bool = False, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a file alone, or (`shared`) beside others who do so; made where it is not there.

    Args:
        path: the file; its folder is what is meant.
        shared: others may hold it too, as long as they share it.
        patience_s: how long to wait for whoever has it.

    Raises:
        InputError: another process has it, or its file system knows no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(handle, path.parent, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + patience_s)
        yield
    finally:
        os.close(handle)


def _take(handle: int, what: Path, how: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                hint = "mount it with locks (Lustre: `-o flock`), or put runs elsewhere with --out"
                raise InputError(f"`{what}` cannot be locked: {error.strerror}", hint=hint) from error
            if time.monotonic() >= until:
                hint = "wait for it: `harness show` says how far it is, and `harness follow` what Slurm jobs do"
                raise InputError(f"`{what}` is being carried out by another process", hint=hint) from error
        time.sleep(_LOOK_S)
