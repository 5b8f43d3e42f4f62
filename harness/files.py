"""Reading and writing: atomic writes, digests, one canonical JSON.

Every file the harness writes is either replaced whole (`write_atomic`) or appended by whole lines (`append_line`),
so that a reader, or a run that was killed, never sees half of one.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.errors import InputError

_BLOCK = 1 << 20


def escape_control(text: str, *, keep: str = "\t") -> str:
    """Text with control and bidirectional characters made visible, so that a terminal only shows it.

    Everything a server, a log or a model wrote goes through here before a person sees it.
    """
    return "".join(_visible(char) if _controls(char) and char not in keep else char for char in text)


def _controls(char: str) -> bool:
    return unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _visible(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal bytes. NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Hex sha256 over the canonical JSON of a value: the identity of plans, cells and locks."""
    return sha256_bytes(canonical_json(value).encode())


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Replace a file whole, or leave the old one: write beside it, fsync, rename."""
    raw = data.encode() if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write `{path}`: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError as error:
        raise InputError(f"cannot write `{path}`: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace a JSON file whole; indented, because people read them."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", mode=mode)


def read_json(path: Path, *, finite: bool = False) -> Any:
    """Read one JSON file; with `finite` one in which NaN and infinity are no numbers, as in all that we store.

    Raises:
        InputError: the file is missing, unreadable or not JSON; says which.
    """
    try:
        text = path.read_text()
        return json.loads(text, parse_constant=_finite, parse_float=_finite) if finite else json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"`{path}` is not valid JSON: {error}") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"`{text}` is no number")
    return value


def append_line(path: Path, line: str, *, sync: bool = False) -> None:
    """Append one line in one write, so that concurrent readers see whole lines only.

    A file that is not there yet is made for its owner alone: what is appended to belongs to a run. A line that a killed
    writer left torn is ended first, so that it costs itself and not the new one.

    Raises:
        InputError: it cannot be written, or not whole (the disk is full).
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + line.encode() + b"\n"
            if os.write(handle, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(f"cannot write `{path}`: {error.strerror}") from error


def read_json_lines(path: Path) -> Iterator[Any]:
    """The complete JSON lines of a file that may still be growing; a torn last line is left out."""
    return (value for _, value in read_numbered_json_lines(path))


def read_numbered_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The same with the number of each line, from 1."""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            if not raw.endswith(b"\n"):
                return
            with contextlib.suppress(ValueError, RecursionError):
                yield number, json.loads(raw)
