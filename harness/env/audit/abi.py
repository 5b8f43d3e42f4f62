"""ABI closure: every torch-facing symbol that an extension needs must come from this environment's PyTorch.

libtorch's C++ interface is stable for no two releases, and a wheel's `abi3` tag speaks of Python's interface only. What
is missing shows at import as `undefined symbol: _ZN3c10...`; here it shows before anything is started.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from harness.env.audit import variants
from harness.env.audit.elf import Library
from harness.env.audit.report import AbiRow, Finding
from harness.env.audit.survey import Binary, Contents, Survey

_TORCH_LIBRARY = re.compile(r"^lib(torch|c10|shm)[^/]*\.so")
_SHOWN = 10

Release = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Marker:
    """A symbol that only some torch releases have; None leaves that end open, as far as is known."""

    symbol: str
    first: Release | None
    last: Release | None


_CHECK = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_"
_DEF = "_ZNR5torch7Library4_defEON3c1014FunctionSchemaEPNS1_12OperatorNameERKSt6vectorI"
# Seen in the released wheels of torch 2.9.1, 2.10.0, 2.11.0 and 2.14.1, and in kernels built against them. An end that
# lies between two of these is set to the wider side.
MARKERS = (
    Marker(f"{_CHECK}ib", None, (2, 9)),
    Marker(f"{_CHECK}jb", (2, 10), (2, 13)),
    Marker(f"{_CHECK}jbPNS0_19CUDAErrorLogCaptureE", (2, 14), None),
    Marker("_ZN3c104cuda19CUDAErrorLogCaptureC1Ev", (2, 14), None),
    Marker("_ZN3c1013MessageLoggerC1EPKcii", None, (2, 9)),
    Marker("_ZN3c1013MessageLoggerC1EPKciib", (2, 10), (2, 10)),
    Marker("_ZN3c1013MessageLoggerC1ENS_14SourceLocationEib", (2, 11), None),
    Marker(f"{_DEF}N2at3TagESaIS8_EENS_17_RegisterOrVerifyE", None, (2, 13)),
    Marker(f"{_DEF}NS_10headeronly3TagESaIS8_EENS_17_RegisterOrVerifyE", (2, 12), None),
)
# SGLang's kernel package by the torch release it is built for, from the wheels' metadata.
_SGLANG_KERNELS: tuple[tuple[Release, str], ...] = (
    ((2, 9), "sgl-kernel 0.3.19 to 0.3.21, or sglang-kernel 0.4.0 to 0.4.1"),
    ((2, 11), "sglang-kernel 0.4.2 to 0.4.5"),
    ((2, 13), "sglang-kernel 0.4.6.post1 to 0.4.7"),
    ((2, 14), "sglang-kernel 0.4.9 to 0.4.10"),
)


def rows(survey: Survey) -> tuple[AbiRow, ...]:
    """One row per library that extends PyTorch; its own libraries and those for other releases left out."""
    given, torch = _exports(survey), _minor(survey.versions().get("torch"))
    return tuple(
        AbiRow(
            distribution=item.name,
            version=item.version,
            path=binary.path,
            imports=len(library.imports),
            missing=None if given is None else _missing(library, item, given),
            built_for=built_for(library.imports),
        )
        for item in survey.contents
        if item.name != "torch"
        for binary, library in _extensions(item, torch)
    )


def findings(survey: Survey) -> list[Finding]:
    """One verdict per distribution that extends PyTorch; names the build, the torch it was made for, and the fix."""
    torch = survey.versions().get("torch")
    by_distribution: dict[tuple[str, str], list[AbiRow]] = {}
    for row in rows(survey):
        by_distribution.setdefault((row.distribution, row.version), []).append(row)
    found = [_judged(f"{name} {version}", name, torch, group) for (name, version), group in by_distribution.items()]
    found += _none_fits(survey)
    if found or not survey.contents:
        return found
    return [_finding("ok", "every library", "nothing that was opened extends PyTorch")]


def built_for(imports: frozenset[str]) -> str | None:
    """The torch releases that a library's symbols point to; None where they say nothing, or contradict each other."""
    seen = [marker for marker in MARKERS if marker.symbol in imports]
    first = max((marker.first for marker in seen if marker.first), default=None)
    last = min((marker.last for marker in seen if marker.last), default=None)
    if first and last:
        if first > last:
            return None
        return _release(first) if first == last else f"{_release(first)} to {_release(last)}"
    if first:
        return f"{_release(first)} or newer"
    return f"{_release(last)} or older" if last else None


def _judged(label: str, name: str, torch: str | None, group: Sequence[AbiRow]) -> Finding:
    if any(row.missing is None for row in group):
        return _finding(
            "cannot tell",
            label,
            f"{len(group)} libraries need PyTorch's, which were not opened",
            "fetch torch: `--fetch`" if torch else "add torch to the spec, or leave this distribution out",
        )
    broken = [row for row in group if row.missing]
    if not broken:
        total = len(group)
        have = "1 library finds" if total == 1 else f"{total} libraries find"
        return _finding("ok", label, f"{have} every symbol in torch {torch}")
    worst = max(broken, key=lambda row: len(row.missing or ()))
    built = next((row.built_for for row in (worst, *broken) if row.built_for), None)
    symbols = sorted({symbol for row in broken for symbol in row.missing or ()})
    message = (
        f"cannot be loaded with torch {torch}: {len(worst.missing or ())} of the symbols that `{worst.path}` "
        f"needs are missing ({len(broken)} of {len(group)} libraries are affected)"
    )
    message += f"; it was built for torch {built}" if built else ""
    message += "; it uses the old C++ string ABI (pre-cxx11)" if any(map(_old_strings, symbols)) else ""
    details = (*(f"{row.path}: {len(row.missing or ())} missing" for row in broken), *symbols[:_SHOWN])
    more = (f"and {len(symbols) - _SHOWN} more symbols",) if len(symbols) > _SHOWN else ()
    return _finding("fail", label, message, _remedy(name, torch, built), (*details, *more))


def _remedy(name: str, torch: str | None, built: str | None) -> str:
    other = f", or pin torch {built}" if built else ""
    if name in ("sgl-kernel", "sglang-kernel") and (release := _minor(torch)):
        fitting = next((kernels for made_for, kernels in _SGLANG_KERNELS if made_for == release), None)
        if fitting:
            return f"use the kernel package for torch {torch}: {fitting}{other}"
    return f"use a build of `{name}` for torch {torch}{other}"


def _exports(survey: Survey) -> frozenset[str] | None:
    """Everything PyTorch's libraries export; None unless all of them were read."""
    torch = survey.of("torch")
    if torch is None:
        return None
    libraries = [binary for binary in torch.binaries if _TORCH_LIBRARY.match(binary.path.rpartition("/")[2])]
    if not libraries or any(binary.library is None for binary in libraries):
        return None
    return frozenset().union(*(binary.library.exports for binary in libraries if binary.library))


def _extensions(item: Contents, torch: Release | None) -> Iterator[tuple[Binary, Library]]:
    """The libraries that need something of PyTorch, save those whose name says that they are for another release."""
    aside = variants.unused(item, "torch", f"{torch[0]}{torch[1]}" if torch else None)
    own = _by_soname(item)
    for binary in item.binaries:
        library = binary.library
        if not library or not library.imports or binary.path in aside or item.name == "torch":
            continue
        if any(_TORCH_LIBRARY.match(needed) for needed in _closure(library, own)):
            yield binary, library


def _none_fits(survey: Survey) -> Iterator[Finding]:
    torch = survey.versions().get("torch")
    release = _minor(torch)
    for item in survey.contents:
        aside = variants.unused(item, "torch", f"{release[0]}{release[1]}" if release else None)
        if aside and not any(_extensions(item, release)):
            message = f"brings {len(aside)} libraries for other torch releases, and none for torch {torch}"
            remedy = f"look for a release of `{item.name}` that knows torch {torch}; what it does without is up to it"
            yield _finding("note", item.label, message, remedy, tuple(sorted(aside)[:_SHOWN]))


def _missing(library: Library, item: Contents, given: frozenset[str]) -> tuple[str, ...]:
    """What neither PyTorch nor the libraries that come along in the same distribution export."""
    own = _by_soname(item)
    missing = library.imports - given
    for needed in _closure(library, own):
        if needed in own:
            missing -= own[needed].exports
    return tuple(sorted(missing))


def _closure(library: Library, own: Mapping[str, Library]) -> set[str]:
    """Every library that loading this one brings in, as far as its distribution goes."""
    reached: set[str] = set()
    waiting = list(library.needed)
    while waiting:
        soname = waiting.pop()
        if soname not in reached:
            reached.add(soname)
            waiting += own[soname].needed if soname in own else ()
    return reached


def _by_soname(item: Contents) -> dict[str, Library]:
    read = [(binary.path.rpartition("/")[2], binary.library) for binary in item.binaries if binary.library]
    return dict(read) | {library.soname: library for _, library in read if library.soname}


def _old_strings(symbol: str) -> bool:
    """A mangled `std::string` of before GCC 5, as a last parameter (Itanium ABI: `Ss`)."""
    return symbol.endswith(("Ss", "ERKSs"))


def _minor(version: str | None) -> Release | None:
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return None
    return (parsed.major, parsed.minor)


def _release(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def _finding(
    state: str, subject: str, message: str, remedy: str | None = None, details: tuple[str, ...] = ()
) -> Finding:
    return Finding.model_validate(
        {"check": "abi", "state": state, "subject": subject, "message": message, "remedy": remedy, "details": details}
    )
