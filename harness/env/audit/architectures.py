"""Architecture coverage: has every binary code for the GPUs of this environment?

Each translation unit of a library carries its own set of targets. A unit without code for a device is an error only
when a kernel of it is launched there (`no kernel image is available for execution on the device`), so the table says in
how many units a device is covered, and a library is `none` when no unit covers it.
"""

import fnmatch
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from harness import strict
from harness.env.audit import fatbin, libraries, variants
from harness.env.audit.report import ArchRow, Coverage, Finding, State
from harness.env.audit.survey import Binary, Contents, Survey

_STATES: dict[fatbin.Verdict, State] = {"native": "ok", "by PTX": "note", "cannot tell": "cannot tell", "none": "fail"}


class Specialised(strict.Strict):
    """Libraries that are made for some devices only and are not used on others: no code for the others is no fault."""

    distribution: str
    paths: str
    devices: tuple[int, ...]
    reason: str
    source: str


class _Known(strict.Strict):
    specialised: tuple[Specialised, ...]


@cache
def specialised() -> tuple[Specialised, ...]:
    """The libraries known to be specialised, from `specialised.yaml` beside this module."""
    return strict.parse(strict.read(Path(__file__).with_name("specialised.yaml")), _Known).specialised


def rows(survey: Survey, architectures: Sequence[str]) -> tuple[ArchRow, ...]:
    """One row per library with device code."""
    return tuple(
        ArchRow(
            distribution=item.name,
            version=item.version,
            path=binary.path,
            targets=tuple(map(str, sorted({target for unit in binary.units for target in unit}))),
            units=sum(binary.units.values()),
            coverage={name: _coverage(binary, fatbin.device(name)) for name in architectures},
        )
        for item in survey.contents
        for binary in item.binaries
        if binary.units
    )


def findings(survey: Survey, architectures: Sequence[str]) -> list[Finding]:
    """Per distribution and architecture, the libraries that lack code; and one line for those that have it."""
    if not architectures:
        message = "the spec names no GPU architecture"
        return [Finding(check="arch", state="ok", subject="every library", message=message)]
    found: list[Finding] = []
    major = libraries.cuda_major(survey)
    for item in survey.contents:
        aside = variants.unused(item, "cuda", str(major) if major else None)
        with_code = [binary for binary in item.binaries if binary.units and binary.path not in aside]
        if with_code:
            found += [finding for name in architectures for finding in _judged(item, with_code, name)]
    if found or not survey.contents:
        return found
    message = "nothing that was opened holds device code"
    return [Finding(check="arch", state="ok", subject="every library", message=message)]


def _coverage(binary: Binary, number: int) -> Coverage:
    verdicts = {unit: fatbin.verdict(unit, number) for unit in binary.units}
    best = min(verdicts.values(), key=fatbin.VERDICTS.index)
    return Coverage(verdict=best, covered=sum(count for unit, count in binary.units.items() if verdicts[unit] == best))


def _judged(item: Contents, binaries: Sequence[Binary], architecture: str) -> list[Finding]:
    number = fatbin.device(architecture)
    by_verdict: dict[fatbin.Verdict, list[Binary]] = {}
    for binary in binaries:
        by_verdict.setdefault(_coverage(binary, number).verdict, []).append(binary)
    found = []
    for verdict in fatbin.VERDICTS:
        group = by_verdict.get(verdict, [])
        excused = {binary.path: reason for binary in group if (reason := _excuse(item.name, binary.path, number))}
        plain = [binary for binary in group if verdict != "none" or binary.path not in excused]
        whole = [binary for binary in plain if _coverage(binary, number).covered == sum(binary.units.values())]
        parts = [binary for binary in plain if binary not in whole]
        if whole:
            found.append(_finding(item, verdict, whole, architecture))
        if parts:
            found.append(_in_parts(item, verdict, parts, architecture))
        if verdict == "none" and excused:
            found.append(
                Finding(
                    check="arch",
                    state="note",
                    subject=item.label,
                    message=f"no code for {architecture} in {len(excused)} libraries that are not used on it",
                    details=tuple(f"{path}: {reason}" for path, reason in excused.items()),
                )
            )
    return found


def _in_parts(item: Contents, verdict: fatbin.Verdict, binaries: Sequence[Binary], architecture: str) -> Finding:
    """Libraries that cover a device in some units only: either they choose among units, or kernels are missing."""
    number = fatbin.device(architecture)
    details = []
    for binary in binaries:
        covered = _coverage(binary, number).covered
        details.append(f"{binary.path}: {verdict} in {covered} of {sum(binary.units.values())} units")
    return Finding(
        check="arch",
        state="cannot tell" if verdict == "cannot tell" else "note",
        subject=_share(item, binaries),
        message=f"code for {architecture} in some of their parts only",
        remedy="their other kernels cannot run there; that is right for a library that picks its kernels by GPU",
        details=tuple(details),
    )


def _finding(item: Contents, verdict: fatbin.Verdict, binaries: Sequence[Binary], architecture: str) -> Finding:
    messages: dict[fatbin.Verdict, tuple[str, str | None]] = {
        "native": (f"machine code for {architecture}", None),
        "by PTX": (
            f"no machine code for {architecture}, but PTX that the driver compiles at first use",
            "expect a slow first start; a build with machine code avoids it",
        ),
        "cannot tell": (
            f"whether there is code for {architecture} cannot be told: the device code was not fully understood",
            "look with `cuobjdump --list-elf --list-ptx`, or run `harness validate --gpu` on the machine",
        ),
        "none": (
            f"no code for {architecture} and no PTX: its kernels end in `no kernel image is available`",
            f"use a build of `{item.name}` whose architecture list covers {architecture}",
        ),
    }
    message, remedy = messages[verdict]
    details = tuple(f"{binary.path}: {_targets(binary)}" for binary in binaries) if verdict != "native" else ()
    subject = _share(item, binaries)
    return Finding(
        check="arch", state=_STATES[verdict], subject=subject, message=message, remedy=remedy, details=details
    )


def _share(item: Contents, binaries: Sequence[Binary]) -> str:
    return f"{item.label} ({len(binaries)} of {sum(bool(other.units) for other in item.binaries)} libraries)"


def _targets(binary: Binary) -> str:
    return " ".join(map(str, sorted({target for unit in binary.units for target in unit})))


def _excuse(distribution: str, path: str, number: int) -> str | None:
    for known in specialised():
        if (
            known.distribution == distribution
            and fnmatch.fnmatchcase(path, known.paths)
            and number not in known.devices
        ):
            return known.reason
    return None
