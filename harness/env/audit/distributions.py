"""What is audited: distributions as wheel files, as installed, or as locked but not on hand.

Nothing here runs or imports the audited code; a wheel is read member by member and never unpacked.
"""

import base64
import contextlib
import csv
import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from harness.errors import Fault, InputError

Hashes = Mapping[str, str | None]  # path below site-packages -> hex sha256 by RECORD, None where it gives none

# `NAME.data/purelib/x` is installed as `x`; the other schemes keep a marker, so that they only meet each other.
_RECORD = re.compile(r"^[^/]+\.dist-info/RECORD$")
_DATA = re.compile(r"^[^/]+\.data/(?P<scheme>[^/]+)/(?P<rest>.+)$")


class Distribution(Protocol):
    """One installed or installable distribution."""

    @property
    def name(self) -> str:
        """The normalized name."""

    @property
    def version(self) -> str:
        """The version, as written."""

    def record(self) -> Hashes:
        """What its RECORD lists."""

    def opened(self) -> AbstractContextManager["Files"]:
        """Its files, for as long as the context lasts."""


class Files(Protocol):
    """The files of one open distribution."""

    def paths(self) -> list[str]:
        """Where each file lies below site-packages, in the order that is cheapest to read."""

    def stream(self, path: str) -> BinaryIO:
        """One file, seekable."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel file on this disk."""

    name: str
    version: str
    path: Path

    @classmethod
    def at(cls, path: Path) -> "Wheel":
        """A wheel by its file.

        Raises:
            InputError: the file name is not a wheel's.
        """
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename as error:
            raise InputError(f"`{path}` is not named as a wheel: {error}") from error
        return cls(str(name), str(version), path)

    def record(self) -> Hashes:
        """What its RECORD lists."""
        with self.opened() as wheel:
            name = next((path for path in wheel.members if _RECORD.match(path)), None)
            if name is None:
                raise InputError(f"`{self.path}` has no RECORD", hint="it is not a complete wheel: fetch it again")
            return _record(wheel.stream(name).read())

    @contextlib.contextmanager
    def opened(self) -> Iterator["_WheelFiles"]:
        """Its files.

        Raises:
            InputError: the file is missing or is no zip archive.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = {_installed(item.filename): item for item in archive.infolist() if not item.is_dir()}
                yield _WheelFiles(archive, members)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InputError(
                f"`{self.path}` is damaged: {error}", hint="delete it and run `harness fetch` again"
            ) from error
        except OSError as error:
            raise InputError(f"cannot read `{self.path}`: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _WheelFiles:
    archive: zipfile.ZipFile
    members: Mapping[str, zipfile.ZipInfo]

    def paths(self) -> list[str]:
        return list(self.members)

    def stream(self, path: str) -> BinaryIO:
        return self.archive.open(self.members[path])  # type: ignore[return-value]  # a seekable binary reader


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution installed under a site-packages folder; `info` is its `.dist-info` folder."""

    name: str
    version: str
    site: Path
    info: Path

    def record(self) -> Hashes:
        """What its RECORD lists; its compiled bytecode left out."""
        try:
            listed = _record((self.info / "RECORD").read_bytes())
        except OSError as error:
            raise InputError(f"cannot read `{self.info / 'RECORD'}`: {error.strerror}") from error
        return {path: sha256 for path, sha256 in listed.items() if not path.endswith(".pyc")}

    @contextlib.contextmanager
    def opened(self) -> Iterator["_InstalledFiles"]:
        """Its files, which may be missing."""
        yield _InstalledFiles(self.site, tuple(self.record()))


@dataclass(frozen=True, slots=True)
class _InstalledFiles:
    site: Path
    listed: tuple[str, ...]

    def paths(self) -> list[str]:
        return [path for path in self.listed if (self.site / path).is_file()]

    def stream(self, path: str) -> BinaryIO:
        return (self.site / path).open("rb")


@dataclass(frozen=True, slots=True)
class Absent:
    """A distribution of the lock whose file is not on hand.

    `file` is its locked file name, `size` in bytes; `binary` says that it is made for one platform and so may hold
    compiled code.
    """

    name: str
    version: str
    file: str
    size: int
    binary: bool


@dataclass(frozen=True, slots=True)
class Source:
    """One environment to audit.

    `patched` maps files that patches change to the sha256 they must have; `toolkit` is the base image's CUDA toolkit.
    Not `complete` when it is known to be a part of an environment only, so that what is not there proves nothing.
    """

    label: str
    distributions: tuple[Distribution, ...]
    absent: tuple[Absent, ...] = ()
    env_id: str | None = None
    toolkit: str | None = None
    patched: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True


def installed(site: Path) -> tuple[Installed, ...]:
    """Every distribution of a site-packages folder.

    Raises:
        InputError: there is no such folder, or a distribution's metadata cannot be read; all at once.
    """
    if not site.is_dir():
        raise InputError(f"there is no site-packages folder `{site}`")
    found: list[Installed] = []
    faults: list[Fault] = []
    for info in sorted(site.glob("*.dist-info")):
        try:
            headers = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8", errors="replace"))
            name, version = headers["Name"], headers["Version"]
        except OSError as error:
            faults.append(Fault(f"cannot read `{info / 'METADATA'}`: {error.strerror}"))
            continue
        if not name or not version:
            faults.append(Fault(f"`{info / 'METADATA'}` names no distribution"))
            continue
        found.append(Installed(str(canonicalize_name(name)), version, site, info))
    if faults:
        raise InputError.of(faults)
    return tuple(found)


def _record(raw: bytes) -> dict[str, str | None]:
    rows = csv.reader(io.StringIO(raw.decode("utf-8", "replace")))
    return {_installed(row[0]): _hex(row[1]) for row in rows if len(row) >= 2}


def _hex(recorded: str) -> str | None:
    """`sha256=` and unpadded urlsafe base64 (PEP 376) as hex; None for no hash or another algorithm."""
    algorithm, _, value = recorded.partition("=")
    if algorithm != "sha256":
        return None
    with contextlib.suppress(ValueError):
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    return None


def _installed(path: str) -> str:
    """Where a wheel's member lands, relative to site-packages."""
    match = _DATA.match(path)
    if match is None:
        return str(PurePosixPath(path))
    rest = match["rest"]
    return rest if match["scheme"] in ("purelib", "platlib") else f"<{match['scheme']}>/{rest}"
