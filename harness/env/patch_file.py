"""The file format of a patch: a DEP-3-style header, then a unified diff. `docs/patches.md` tells it to people.

Everything works on bytes, and only a line feed ends a line, so that no other byte of a target is ever touched.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from harness.errors import Fault, InputError, Location
from harness.files import sha256_bytes
from harness.strict import suggest

ONCE = ("Description", "Origin", "Applies-To", "Remove-When")
MANY = ("Upstream", "Target", "Absorbed-When", "Probe")
REQUIRED = ("Description", "Origin", "Applies-To", "Target", "Remove-When", "Probe")

_FIELD = re.compile(r"([A-Za-z][A-Za-z-]*):(?:[ \t]+(.*))?$")
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_SHA256 = re.compile(r"[0-9a-f]{64}$")
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change: at `line` (from 1, in the file before this patch) stands `before`, and `after` is to stand."""

    line: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One file, by its path under site-packages: its sha256 before and after, and what changes in between."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Marker:
    """Text (`regex`, searched in the file at `path`) that says upstream has what the patch brings."""

    path: str
    regex: str


@dataclass(frozen=True, slots=True)
class Probe:
    """How one sees that the patch engages: a server log line (regex), or a Python statement that must not raise."""

    kind: Literal["log", "python"]
    text: str


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch file. Its identity is `sha256`, over the whole file."""

    name: str
    sha256: str
    description: str
    origin: str
    upstream: tuple[str, ...]
    package: str
    versions: SpecifierSet
    targets: tuple[Target, ...]
    absorbed_when: tuple[Marker, ...]
    remove_when: str
    probes: tuple[Probe, ...]


def load(path: Path) -> Patch:
    """Read one patch file.

    Raises:
        InputError: the file cannot be read, or every fault in it at once, each with its line.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read patch `{path}`: {error.strerror}") from error
    return parse(raw, path.name.removesuffix(".patch"), str(path))


def load_named(folder: Path, names: Iterable[str]) -> tuple[Patch, ...]:
    """The patches a spec names, in its order.

    Raises:
        InputError: the faults of all of them at once.
    """
    known = {path.name.removesuffix(".patch"): path for path in sorted(folder.glob("*.patch"))}
    patches, problems = [], []
    for name in names:
        try:
            if name not in known:
                raise InputError(f"no patch `{name}` in `{folder}`", hint=suggest(name, known))
            patches.append(load(known[name]))
        except InputError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        details = [line for problem in problems for line in (problem.message, *problem.details)]
        raise InputError(f"{len(problems)} patches cannot be read", details=details)
    return tuple(patches)


def parse(raw: bytes, name: str, where: str) -> Patch:
    """`load` for bytes already in hand; `where` is what messages call the file."""
    faults = _Faults(where)
    lines = lines_of(raw)
    start = next((index for index, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header = _header(lines[:start], faults)
    hunks = _diff(lines, start, faults)
    patch = _assemble(name, sha256_bytes(raw), header, hunks, faults)
    if patch is None or faults.found:
        raise InputError.of(sorted(faults.found, key=lambda fault: fault.where.line if fault.where else 0))
    return patch


class _Faults:
    """The faults of one file, gathered while it is read; lines count from 0 here, from 1 in the messages."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[Fault] = []

    def add(self, index: int, message: str, hint: str | None = None) -> None:
        self.found.append(Fault(message, Location(self.where, index + 1, 1), hint))


Header = dict[str, list[tuple[int, str]]]


def _header(lines: Sequence[bytes], faults: _Faults) -> Header:
    """Field name to its (line index, text); continuation lines begin with a space."""
    header: Header = {}
    last: list[tuple[int, str]] | None = None
    for index, raw in enumerate(lines):
        line = raw.decode("utf-8", errors="replace").rstrip()
        if not line:
            continue
        if line[0] in " \t":
            if last is None:
                faults.add(index, "a continuation line before any field")
            else:
                last[-1] = (last[-1][0], f"{last[-1][1]}\n{line.strip()}")
        elif match := _FIELD.match(line):
            last = _field(header, index, match, faults)
        else:
            faults.add(index, f"`{line[:60]}` is neither a header field nor part of a diff")
    for field in REQUIRED:
        if field not in header:
            faults.add(0, f"header field `{field}` is missing")
    return header


def _field(header: Header, index: int, match: re.Match[str], faults: _Faults) -> list[tuple[int, str]]:
    field, text = match[1], (match[2] or "").strip()
    if field not in ONCE + MANY:
        faults.add(index, f"unknown header field `{field}`", suggest(field, ONCE + MANY))
    elif field in header and field in ONCE:
        faults.add(index, f"header field `{field}` is given twice")
    entries = header.setdefault(field, [])
    entries.append((index, text))
    return entries


def _diff(lines: Sequence[bytes], start: int, faults: _Faults) -> dict[str, tuple[int, list[Hunk]]]:
    """Path to (line index of its `---`, hunks)."""
    found: dict[str, tuple[int, list[Hunk]]] = {}
    index, shift = start, 0
    hunks: list[Hunk] | None = None
    if start == len(lines):
        faults.add(max(0, len(lines) - 1), "no diff follows the header")
    while index < len(lines):
        line = lines[index].rstrip(b"\n")
        if line.startswith(b"--- "):
            path = _names(lines, index, faults)
            if path in found:
                faults.add(index, f"`{path}` is changed twice; put its hunks together")
            hunks, shift = [], 0
            found[path] = (index, hunks)
            index += 2
        elif (match := _HUNK.match(line)) and hunks is not None:
            index, shift = _hunk(lines, index, match, hunks, shift, faults)
        else:
            faults.add(index, f"`{line.decode(errors='replace')[:60]}` belongs to no hunk")
            index += 1
    return found


def _names(lines: Sequence[bytes], index: int, faults: _Faults) -> str:
    """The path in a `--- a/PATH`, `+++ b/PATH` pair."""
    old = lines[index][4:].split(b"\t")[0].decode(errors="replace").strip()
    after = lines[index + 1] if index + 1 < len(lines) else b""
    new = after[4:].split(b"\t")[0].decode(errors="replace").strip()
    if not after.startswith(b"+++ "):
        faults.add(index + 1, "`+++ b/PATH` must follow `--- a/PATH`")
    elif "/dev/null" in (old, new):
        faults.add(index, "a patch changes files; it neither creates nor deletes them", "ship a new file as a package")
    elif old.removeprefix("a/") != new.removeprefix("b/"):
        faults.add(index, f"`{old}` and `{new}` name different files")
    return old.removeprefix("a/")


def _hunk(
    lines: Sequence[bytes], index: int, match: re.Match[bytes], hunks: list[Hunk], shift: int, faults: _Faults
) -> tuple[int, int]:
    """Read the hunk at `index` into `hunks`; gives the index behind it and the lines gained in this file so far."""
    line, removed, new_line, added = (1 if part is None else int(part) for part in match.groups())
    before: list[bytes] = []
    after: list[bytes] = []
    position = index + 1
    while position < len(lines):
        complete = len(before) >= removed and len(after) >= added
        if lines[position].startswith(_NO_NEWLINE):
            _without_newline(lines[position - 1][:1], before, after)
        elif complete or not _hunk_line(lines[position], before, after):
            break
        position += 1
    if (len(before), len(after)) != (removed, added):
        faults.add(index, f"the hunk says -{removed} +{added} lines, it has -{len(before)} +{len(after)}")
    elif not before or not line:
        faults.add(index, "the hunk has no line to stand on", "give it a line of context; lines count from 1")
    elif before == after:
        faults.add(index, "the hunk changes nothing")
    elif new_line != line + shift:
        faults.add(index, f"the hunk starts at new line {new_line}, by the hunks before it that is {line + shift}")
    elif hunks and line < hunks[-1].line + len(hunks[-1].before):
        faults.add(index, "the hunk overlaps the one before it")
    hunks.append(Hunk(line, tuple(before), tuple(after)))
    return position, shift + len(after) - len(before)


def _hunk_line(line: bytes, before: list[bytes], after: list[bytes]) -> bool:
    """Take one line of a hunk's body; False when it is none."""
    # Editors strip the space of an empty context line.
    mark, rest = (b" ", line) if line == b"\n" else (line[:1], line[1:])
    if mark not in (b" ", b"-", b"+"):
        return False
    if mark != b"+":
        before.append(rest)
    if mark != b"-":
        after.append(rest)
    return True


def _without_newline(mark: bytes, before: list[bytes], after: list[bytes]) -> None:
    """The line just read, by its mark, ends without a newline."""
    for side in (before if mark != b"+" else None, after if mark != b"-" else None):
        if side:
            side[-1] = side[-1].removesuffix(b"\n")


def _assemble(
    name: str, sha256: str, header: Header, hunks: Mapping[str, tuple[int, list[Hunk]]], faults: _Faults
) -> Patch | None:
    package, versions = _applies_to(header, faults)
    targets = _targets(header, hunks, faults)
    markers = _markers(header, hunks, faults)
    probes = _probes(header, faults)
    for field in ("Description", "Origin", "Remove-When"):
        for index, text in header.get(field, []):
            if not text:
                faults.add(index, f"header field `{field}` is empty")
    if faults.found:
        return None
    return Patch(
        name=name,
        sha256=sha256,
        description=header["Description"][0][1],
        origin=header["Origin"][0][1],
        upstream=tuple(text for _, text in header.get("Upstream", [])),
        package=package,
        versions=versions,
        targets=targets,
        absorbed_when=markers,
        remove_when=header["Remove-When"][0][1],
        probes=probes,
    )


def _applies_to(header: Header, faults: _Faults) -> tuple[str, SpecifierSet]:
    for index, text in header.get("Applies-To", []):
        package, _, versions = text.partition(" ")
        try:
            if package and versions.strip():
                return canonicalize_name(package), SpecifierSet(versions.strip(), prereleases=True)
            faults.add(index, f"`Applies-To` wants `PACKAGE VERSIONS`, got `{text}`", "for instance `sglang ==0.5.9`")
        except InvalidSpecifier:
            faults.add(index, f"`{versions.strip()}` is no version specifier", "for instance `==0.5.9`")
    return "", SpecifierSet()


def _targets(header: Header, hunks: Mapping[str, tuple[int, list[Hunk]]], faults: _Faults) -> tuple[Target, ...]:
    targets: dict[str, Target] = {}
    for index, text in header.get("Target", []):
        words = text.split()
        if len(words) != 3 or not _SHA256.match(words[1]) or not _SHA256.match(words[2]):
            faults.add(index, f"`Target` wants `PATH SHA256-BEFORE SHA256-AFTER`, got `{text[:60]}`")
            continue
        path, before, after = words
        if path in targets:
            faults.add(index, f"target `{path}` is given twice")
        elif PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            faults.add(index, f"target `{path}` leaves site-packages")
        elif before == after:
            faults.add(index, f"target `{path}` has the same sha256 before and after")
        elif path not in hunks:
            faults.add(index, f"target `{path}` has no hunks in the diff", suggest(path, hunks))
        targets[path] = Target(path, before, after, tuple(hunks[path][1]) if path in hunks else ())
    for path, (index, found) in hunks.items():
        if path not in targets:
            faults.add(index, f"the diff changes `{path}`, which is no `Target`", suggest(path, targets))
        elif not found:
            faults.add(index, f"`{path}` has no hunks")
    return tuple(targets.values())


def _markers(header: Header, paths: Iterable[str], faults: _Faults) -> tuple[Marker, ...]:
    markers = []
    for index, text in header.get("Absorbed-When", []):
        path, _, regex = text.partition(" ")
        problem = _regex_problem(regex.strip())
        if problem:
            faults.add(index, f"`Absorbed-When` wants `PATH REGEX`: {problem}")
        elif path not in paths:
            faults.add(index, f"`Absorbed-When` names `{path}`, which is no target", suggest(path, paths))
        markers.append(Marker(path, regex.strip()))
    return tuple(markers)


def _probes(header: Header, faults: _Faults) -> tuple[Probe, ...]:
    probes = []
    for index, text in header.get("Probe", []):
        kind, _, body = text.partition(" ")
        body = body.strip()
        if kind == "log":
            if problem := _regex_problem(body):
                faults.add(index, f"`Probe: log` wants a regular expression: {problem}")
            probes.append(Probe("log", body))
        elif kind == "python":
            try:
                compile(body, "probe", "exec")
            except (SyntaxError, ValueError) as error:
                faults.add(index, f"`Probe: python` does not compile: {getattr(error, 'msg', error)}")
            probes.append(Probe("python", body))
        else:
            faults.add(index, f"`Probe` wants `log REGEX` or `python STATEMENT`, got `{text[:60]}`")
    return tuple(probes)


def _regex_problem(regex: str) -> str | None:
    if not regex:
        return "it is empty"
    try:
        re.compile(regex)
    except re.error as error:
        return str(error)
    return None


def render(patch: Patch) -> bytes:
    """A patch as its file; `parse` gives the patch back."""
    header = [
        f"Description: {_folded(patch.description)}",
        f"Origin: {_folded(patch.origin)}",
        *(f"Upstream: {_folded(text)}" for text in patch.upstream),
        f"Applies-To: {patch.package} {patch.versions}",
        *(f"Target: {target.path} {target.before} {target.after}" for target in patch.targets),
        *(f"Absorbed-When: {marker.path} {marker.regex}" for marker in patch.absorbed_when),
        f"Remove-When: {_folded(patch.remove_when)}",
        *(f"Probe: {probe.kind} {_folded(probe.text)}" for probe in patch.probes),
        "",
    ]
    body = b"".join(_rendered(target) for target in patch.targets)
    return "\n".join([*header, ""]).encode() + body


def _rendered(target: Target) -> bytes:
    parts = [f"--- a/{target.path}\n+++ b/{target.path}\n".encode()]
    shift = 0
    for hunk in target.hunks:
        sizes = f"-{hunk.line},{len(hunk.before)} +{hunk.line + shift},{len(hunk.after)}"
        parts.append(f"@@ {sizes} @@\n".encode())
        parts += _marked(hunk)
        shift += len(hunk.after) - len(hunk.before)
    return b"".join(parts)


def _marked(hunk: Hunk) -> list[bytes]:
    """A hunk's lines with their marks: what both sides begin and end with is context, the rest is diffed."""
    head = _common(hunk.before, hunk.after)
    tail = _common(hunk.before[head:][::-1], hunk.after[head:][::-1])
    old, new = hunk.before[head : len(hunk.before) - tail], hunk.after[head : len(hunk.after) - tail]
    result = [b" " + line for line in hunk.before[:head]]
    for kind, *span in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            result += [b" " + line for line in old[span[0] : span[1]]]
        else:
            result += [b"-" + line for line in old[span[0] : span[1]]]
            result += [b"+" + line for line in new[span[2] : span[3]]]
    result += [b" " + line for line in hunk.before[len(hunk.before) - tail :]]
    return [line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE + b"\n" for line in result]


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """How many lines two blocks begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _folded(text: str) -> str:
    return text.replace("\n", "\n ")


def lines_of(data: bytes) -> list[bytes]:
    """Lines with their ends; only a line feed ends one, so that no other byte is touched."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
