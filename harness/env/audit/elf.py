"""What a shared library says of itself, read from a stream: libraries it needs, torch-facing symbols, sections.

Only little-endian ELF64 is read, which is all that Linux wheels for x86_64 and aarch64 hold. The stream may be a zip
member: it is read forwards in two passes (the section table lies at the end of the file), never held whole. The layout
is the System V ABI's, "Object files" and "Dynamic linking"; numpy reads the symbol tables, libtorch's being 10^5 long.
"""

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

MAGIC = b"\x7fELF"
_BLOCK = 1 << 20
_DYNSYM, _DYNAMIC = 11, 6
_NEEDED, _SONAME = 1, 14
_GLOBAL, _UNIQUE, _WEAK = 1, 10, 2
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)

# Symbols that belong to PyTorch's C++ interface: a mangled name that mentions the namespaces c10, at, torch or caffe2,
# or the C shims (`aoti_torch_*`, `torch_*`) behind the stable interface.
TORCH_FACING = re.compile(rb"^_Z.*(?<![0-9])(?:3c10|2at|5torch|6caffe2)(?=[A-Z0-9a-z])|^(?:aoti_)?torch_|^THP")


class Unreadable(Exception):
    """The bytes are not a library this reader understands; the message says why."""


@dataclass(frozen=True, slots=True)
class Section:
    """One section of the file; `link` is the index of the section it refers to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library. `imports` are its undefined non-weak symbols, `exports` the visible ones, torch-facing only."""

    needed: tuple[str, ...]
    soname: str | None
    imports: frozenset[str]
    exports: frozenset[str]
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Ends:
    """A first pass over a stream: its digest, its first bytes, its last ones, and where a mark was seen."""

    sha256: str
    size: int
    head: bytes
    tail: bytes
    marks: tuple[int, ...] = ()


def drain(stream: BinaryIO, mark: bytes = b"") -> Ends:
    """Read a stream to its end, keeping the first 64 bytes, at least the last MiB, and every offset of `mark`."""
    digest, size, head, before, last = hashlib.sha256(), 0, b"", b"", b""
    marks: list[int] = []
    while block := stream.read(_BLOCK):
        digest.update(block)
        head = head or block[:64]
        if mark:
            window = last[1 - len(mark) :] + block  # one that straddles two blocks counts too
            marks += [size + len(block) - len(window) + at.start() for at in re.finditer(re.escape(mark), window)]
        size += len(block)
        before, last = last, block
    return Ends(digest.hexdigest(), size, head, before + last, tuple(marks))


def read(stream: BinaryIO, ends: Ends) -> Library:
    """Read a library whose stream was drained before.

    Raises:
        Unreadable: not ELF64 little-endian, no section table, or cut short.
    """
    if ends.head[:4] != MAGIC or len(ends.head) < 64:
        raise Unreadable("not an ELF file")
    if ends.head[4:6] != b"\x02\x01":
        raise Unreadable("not a little-endian 64-bit ELF file")
    sections = _sections(ends, _fetcher(stream, ends))
    wanted = [section for section in sections if section.kind in (_DYNSYM, _DYNAMIC)]
    wanted += [sections[section.link] for section in wanted if section.link < len(sections)]
    contents = {section: _exactly(stream, section) for section in sorted(set(wanted), key=lambda item: item.offset)}
    needed, soname = _dynamic(sections, contents)
    imports, exports = _symbols(sections, contents)
    return Library(needed, soname, imports, exports, tuple(sections))


def _fetcher(stream: BinaryIO, ends: Ends) -> Callable[[int, int], bytes]:
    """Bytes at an offset, from the kept tail where it has them, so that a compressed member is not read again."""
    start = ends.size - len(ends.tail)

    def fetch(offset: int, size: int) -> bytes:
        if offset + size > ends.size:
            raise Unreadable(f"cut short: {ends.size} bytes, {offset + size} expected")
        if offset >= start:
            return ends.tail[offset - start : offset - start + size]
        stream.seek(offset)
        return stream.read(size)

    return fetch


def _sections(ends: Ends, fetch: Callable[[int, int], bytes]) -> list[Section]:
    (table,) = struct.unpack_from("<Q", ends.head, 40)
    entry, count, names = struct.unpack_from("<HHH", ends.head, 58)
    if not table or entry != 64:
        raise Unreadable("it has no section table")
    if count == 0:  # more sections than 16 bits hold: the real numbers stand in the first entry
        first = fetch(table, 64)
        (count,) = struct.unpack_from("<Q", first, 32)
        names = names if names != 0xFFFF else struct.unpack_from("<I", first, 40)[0]
    if not 0 < count < 1 << 20 or names >= count:
        raise Unreadable("its section table is damaged")
    raw = fetch(table, count * 64)
    rows = [struct.unpack_from("<IIQQQQII", raw, index * 64) for index in range(count)]
    text = fetch(rows[names][4], rows[names][5])
    return [Section(_text(text, row[0]), row[1], row[4], row[5], row[6]) for row in rows]


def _exactly(stream: BinaryIO, section: Section) -> bytes:
    stream.seek(section.offset)
    data = stream.read(section.size)
    if len(data) != section.size:
        raise Unreadable(f"cut short in `{section.name}`")
    return data


def _dynamic(sections: Sequence[Section], contents: dict[Section, bytes]) -> tuple[tuple[str, ...], str | None]:
    needed: list[str] = []
    soname = None
    for section in (section for section in contents if section.kind == _DYNAMIC):
        text = contents.get(sections[section.link], b"") if section.link < len(sections) else b""
        data = contents[section]
        for tag, value in struct.iter_unpack("<QQ", data[: len(data) // 16 * 16]):
            if tag == _NEEDED:
                needed.append(_text(text, value))
            elif tag == _SONAME:
                soname = _text(text, value)
    return tuple(needed), soname


def _symbols(sections: Sequence[Section], contents: dict[Section, bytes]) -> tuple[frozenset[str], frozenset[str]]:
    imports: set[str] = set()
    exports: set[str] = set()
    for section in (section for section in contents if section.kind == _DYNSYM):
        data = contents[section]
        text = contents.get(sections[section.link], b"") if section.link < len(sections) else b""
        table = np.frombuffer(data[: len(data) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL)
        binding, undefined = table["info"] >> 4, table["section"] == 0
        visible = (binding == _GLOBAL) | (binding == _UNIQUE) | (binding == _WEAK)
        hidden = np.isin(table["other"] & 3, (1, 2))
        imports.update(_torch_facing(text, table["name"][undefined & (binding == _GLOBAL)]))
        exports.update(_torch_facing(text, table["name"][~undefined & visible & ~hidden]))
    return frozenset(imports), frozenset(exports)


def _torch_facing(text: bytes, offsets: Iterable[int]) -> list[str]:
    names = (text[offset : text.find(b"\0", offset)] for offset in map(int, offsets))
    return [name.decode("ascii", "replace") for name in names if TORCH_FACING.search(name)]


def _text(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else len(table)].decode("ascii", "replace")
