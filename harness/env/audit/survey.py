"""One pass over everything that is audited: what every check then decides from.

Each file is read once whole, for its digest; libraries are then read a second time for their tables. Memory stays at
the size of one library's symbol table, whatever the size of the wheel.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

from harness.env.audit import elf, fatbin
from harness.env.audit.distributions import Absent, Distribution, Files, Source

_SIDE_BY_SIDE = 2  # distributions at once: inflating and hashing run outside the interpreter lock


@dataclass(frozen=True, slots=True)
class Binary:
    """One shared library; `units` counts equal sets of targets, `problem` says why it could not be read."""

    path: str
    library: elf.Library | None = None
    units: Mapping[fatbin.Unit, int] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What one distribution holds.

    `paths` gives each file's sha256 by RECORD, `altered` the files whose bytes differ from it, `lost` those that are
    listed but not there, `unlisted` those that are there but not listed.
    """

    name: str
    version: str
    paths: Mapping[str, str | None]
    altered: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    binaries: tuple[Binary, ...] = ()

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that was read, in the order of the names; `toolkit` and `complete` as in `Source`."""

    contents: tuple[Contents, ...]
    absent: tuple[Absent, ...] = ()
    toolkit: str | None = None
    complete: bool = True

    def of(self, name: str) -> Contents | None:
        """One distribution's contents."""
        return next((item for item in self.contents if item.name == name), None)

    def versions(self) -> dict[str, str]:
        """Version by name, of what was read and of what is absent."""
        return {item.name: item.version for item in self.absent} | {item.name: item.version for item in self.contents}


def take(source: Source, *, progress: Callable[[str], None] | None = None) -> Survey:
    """Read a source; `progress` is told each distribution's name when it has been read."""

    def one(distribution: Distribution) -> Contents:
        result = _contents(distribution, source.patched)
        if progress:
            progress(distribution.name)
        return result

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        contents = list(pool.map(one, source.distributions))
    ordered = tuple(sorted(contents, key=lambda item: item.name))
    return Survey(ordered, source.absent, source.toolkit, source.complete)


def _contents(distribution: Distribution, patched: Mapping[str, str]) -> Contents:
    record = distribution.record()
    altered: list[str] = []
    binaries: list[Binary] = []
    with distribution.opened() as files:
        present = files.paths()
        for path in present:
            with files.stream(path) as stream:
                ends = elf.drain(stream, fatbin.MARK)
            if (expected := patched.get(path) or record.get(path)) and expected != ends.sha256:
                altered.append(path)
            if ends.head.startswith(elf.MAGIC) and (".so" in path.rpartition("/")[2]):
                binaries.append(_binary(files, path, ends))
    there = set(present)
    return Contents(
        distribution.name,
        distribution.version,
        record,
        altered=tuple(altered),
        lost=tuple(path for path in record if path not in there),
        unlisted=tuple(path for path in present if path not in record and not _unrecorded(path)),
        binaries=tuple(binaries),
    )


def _unrecorded(path: str) -> bool:
    """Signatures are the files that RECORD must not list (binary distribution format, "The .dist-info directory")."""
    return path.count("/") == 1 and path.endswith((".dist-info/RECORD.jws", ".dist-info/RECORD.p7s"))


def _binary(files: Files, path: str, ends: elf.Ends) -> Binary:
    with files.stream(path) as stream:
        try:
            library = elf.read(stream, ends)
        except elf.Unreadable as error:
            return Binary(path, problem=str(error))
        return Binary(path, library, dict(Counter(_units(stream, library, ends))))


def _units(stream: BinaryIO, library: elf.Library, ends: elf.Ends) -> Iterator[fatbin.Unit]:
    """The device code of a library, in its sections and elsewhere, in the order of the file."""
    sections = [section for section in library.sections if section.name in fatbin.SECTIONS]
    elsewhere = [
        mark for mark in ends.marks if not any(part.offset <= mark < part.offset + part.size for part in sections)
    ]
    places = [(section.offset, section.size) for section in sections] + [(mark, 0) for mark in elsewhere]
    for offset, size in sorted(places):
        if size:
            yield from fatbin.units(stream, offset, size)
        else:
            # Compilers hold the mark as a constant of their code: there, what follows is no container.
            found = islice(fatbin.units(stream, offset, ends.size - offset), 1)
            yield from (unit for unit in found if unit != {fatbin.UNKNOWN})
