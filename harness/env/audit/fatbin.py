"""For which GPUs a binary holds code: the targets in its `.nv_fatbin`, and what they mean for a device.

NVIDIA does not document the container. What is used here was found by compiling with nvcc 13.0 and by reading released
wheels built with CUDA 12.x and 13.x (64-bit numbers are little-endian):

    container   u32 magic 0xBA55ED50, u16 version (1), u16 header size, u64 body size; several may follow each other
    entry       u16 kind (1 PTX, 2 machine code, 8 link-time IR), u16 version, u32 header size, u64 payload size,
                at +28 u32 architecture number, at +40 u64 flags

Nothing is decompressed. A kind or a flag not known here makes the target uncertain: "cannot tell", never "fine".
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

SECTIONS = (".nv_fatbin", "__nv_relfatbin")  # the second one is where `-rdc=true` puts it

_MAGIC = 0xBA55ED50
# How a container begins; some libraries (cuFFT) keep theirs as plain data, outside the sections above.
MARK = struct.pack("<IHH", _MAGIC, 1, 16)
_CONTAINER, _ENTRY = 16, 48  # bytes of each header that are read
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21
_COMPRESSED = 1 << 13 | 1 << 15
_STUB = 8 << 10  # bytes; machine code without kernels is smaller
# Bits of files whose targets are known: 64-bit (0), debug (1), Linux (4), LZ4 (13), zstd (15), sm_100 and later (24).
_KNOWN_FLAGS = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 13 | 1 << 15 | _SPECIFIC | _FAMILY | 1 << 24
# Which devices run family-specific code (suffix f), after the CUDA C++ programming guide, "Family-specific features".
_FAMILIES = {100: {100, 103}, 101: {101}, 103: {103}, 110: {110}, 120: {120, 121}, 121: {121}}
# Embedded chips: machine code does not move between them and the desktop chips of the same major number.
_EMBEDDED = {53, 62, 72, 87, 101}

Verdict = Literal["native", "by PTX", "cannot tell", "none"]
VERDICTS: tuple[Verdict, ...] = ("native", "by PTX", "cannot tell", "none")  # best first


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One entry: `number` is 120 for sm_120, `suffix` is "", "a" or "f"; not `certain` when it was not understood.

    An unknown one has the entry's kind as its number, 0 where not even that could be read.
    """

    kind: Literal["sm", "compute", "unknown"]
    number: int
    suffix: str = ""
    certain: bool = True

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "unknown"
        return f"{self.kind}_{self.number}{self.suffix}{'' if self.certain else '?'}"


UNKNOWN = Target("unknown", 0, certain=False)
Unit = frozenset[Target]  # the targets of one container, that is of one translation unit


def units(stream: BinaryIO, offset: int, size: int) -> Iterator[Unit]:
    """The containers of one section that hold kernels, read forwards; what cannot be decoded ends as one `UNKNOWN`."""
    position, end = offset, offset + size
    while position + 8 <= end:
        stream.seek(position)
        header = stream.read(_CONTAINER)
        if not any(header[:8]):  # padding between containers
            position += 8
            continue
        if len(header) < _CONTAINER:
            yield frozenset({UNKNOWN})
            return
        magic, version, header_size, body = struct.unpack("<IHHQ", header)
        start = position + header_size
        if magic != _MAGIC or version != 1 or header_size < _CONTAINER or start + body > end:
            yield frozenset({UNKNOWN})
            return
        if unit := frozenset(_targets(stream, start, start + body)):
            yield unit
        position = start + body + -(header_size + body) % 8


def _targets(stream: BinaryIO, position: int, end: int) -> Iterator[Target]:
    while position < end:
        stream.seek(position)
        header = stream.read(_ENTRY)
        if len(header) < _ENTRY:
            yield UNKNOWN
            return
        kind, _, header_size, payload = struct.unpack_from("<HHIQ", header)
        if header_size < _ENTRY or position + header_size + payload > end:
            yield UNKNOWN
            return
        (number,), (flags,) = struct.unpack_from("<I", header, 28), struct.unpack_from("<Q", header, 40)
        if kind != 2 or flags & _COMPRESSED or payload > _STUB or _has_kernels(stream, position + header_size, payload):
            yield _target(kind, number, flags)
        position += header_size + payload


def _has_kernels(stream: BinaryIO, position: int, size: int) -> bool:
    """Whether machine code holds any kernel: each has a section `.text.NAME`. Linkers leave stubs that have none."""
    stream.seek(position)
    return b".text." in stream.read(size)


def _target(kind: int, number: int, flags: int) -> Target:
    if kind not in (1, 2):
        return Target("unknown", kind, certain=False)
    both = _SPECIFIC | _FAMILY
    suffix = {_SPECIFIC: "a", _FAMILY: "f"}.get(flags & both, "")
    certain = not flags & ~_KNOWN_FLAGS and flags & both != both
    return Target("compute" if kind == 1 else "sm", number, suffix, certain)


def device(architecture: str) -> int:
    """The number of a requested architecture: `sm_120a`, `compute_120`, `12.0a` and `120` all ask for device 120."""
    text = architecture.lower().removeprefix("sm_").removeprefix("compute_").rstrip("af")
    major, dot, minor = text.partition(".")
    return int(major) * 10 + int(minor) if dot else int(text)


def verdict(unit: Iterable[Target], number: int) -> Verdict:
    """The best that one unit has for a device."""
    return min((_one(target, number) for target in unit), key=VERDICTS.index, default="none")


def _one(target: Target, number: int) -> Verdict:
    fits = _fits(target, number)
    if not target.certain or fits is None:
        return "cannot tell"
    if not fits:
        return "none"
    return "native" if target.kind == "sm" else "by PTX"


def _fits(target: Target, number: int) -> bool | None:
    """Whether a device runs this code; None when the rule for it is not known."""
    if target.suffix == "a":
        return target.number == number
    if target.suffix == "f":
        family = _FAMILIES.get(target.number)
        return number in family if family else (None if target.number // 10 == number // 10 else False)
    if target.kind == "compute":
        return target.number <= number
    if target.number == number:
        return True
    if (target.number in _EMBEDDED) != (number in _EMBEDDED):
        return False
    return target.number // 10 == number // 10 and target.number < number
