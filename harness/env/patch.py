"""Patches bound to the bytes they were written for: zero fuzz, zero offset, all targets or none.

Each target of a patch carries the sha256 it must have before and the one it gets; so a patch either meets exactly the
file it was written for, or is refused. Patches that touch one file form a chain: the second is written on top of what
the first leaves. `patch_file` has the format, `docs/patches.md` the how-to.
"""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import itertools
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.env.patch_file import Hunk, Patch, Target, lines_of, render
from harness.errors import AnswerIsNo, BuildError, HarnessError, InputError
from harness.files import sha256_bytes, write_atomic

ReadTarget = Callable[[str], bytes | None]
"""Bytes of a file by its path under site-packages; None where there is no such file."""

State = Literal["applies", "needs refresh", "absorbed upstream", "conflict"]

MAX_CONTEXT = 12

# Members under NAME.data/purelib or platlib are installed into site-packages like the rest.
_SCHEME = re.compile(r"^[^/]+\.data/(purelib|platlib)/")


@dataclass(frozen=True, slots=True)
class Applied:
    """One target of one patch as `apply` left it; `already` when it was so before."""

    patch: str
    path: str
    before: str
    after: str
    already: bool


@dataclass(frozen=True, slots=True)
class Drift:
    """A patched file that is not what its patches leave; `seen` is None when the file is gone."""

    patch: str
    path: str
    expected: str
    seen: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Status:
    """How one patch stands against one version of its package, and why."""

    patch: str
    state: State
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Link:
    """One patch's turn at one file."""

    patch: str
    target: Target


def apply(patches: Sequence[Patch], site_packages: Path) -> list[Applied]:
    """Apply patches, in order, to an installed environment.

    Every target is checked before any is written, a failed write puts back what was written before it, and what is
    applied already is recognised and left alone.

    Args:
        patches: in the order of the spec; patches of one file must build on each other.
        site_packages: the folder target paths are relative to.

    Raises:
        BuildError: a package is absent or of another version, a target is missing or has other bytes, or a write
            failed; each target by name. Nothing is changed then.
    """
    chains = _chains(patches)
    problems = _version_problems(patches, site_packages)
    applied: list[Applied] = []
    changes: dict[Path, tuple[bytes, bytes]] = {}
    for path, links in chains.items():
        file = site_packages / path
        try:
            old = file.read_bytes()
            new, results = _advance(old, links)
        except OSError as error:
            problems.append(f"`{links[0].patch}`: cannot read `{path}`: {error.strerror}")
        except _RefusedError as refused:
            problems.append(str(refused))
        else:
            applied += results
            if new != old:
                changes[file] = (old, new)
    if problems:
        raise BuildError(
            "patches do not fit this environment; nothing was changed",
            details=list(dict.fromkeys(problems)),
            hint="`harness patch status SPEC` says how each patch stands against the locked version",
        )
    _write(changes)
    return applied


def verify(patches: Sequence[Patch], site_packages: Path) -> list[Drift]:
    """The patched files that are not what the patches leave: edited since, not patched, or gone."""
    drift = []
    for path, links in _chains(patches).items():
        last = links[-1]
        seen = _digest(site_packages / path)
        if seen == last.target.after:
            continue
        before = {link.target.before: link.patch for link in links}
        if seen is None:
            message = f"`{path}` is gone"
        elif seen in before:
            message = f"`{path}` is without patch `{before[seen]}`"
        else:
            message = f"`{path}` was edited since patch `{last.patch}` was applied"
        drift.append(Drift(last.patch, path, last.target.after, seen, message))
    return drift


class _RefusedError(Exception):
    """A target that is not what its patch was written for."""


def _chains(patches: Sequence[Patch]) -> dict[str, list[_Link]]:
    chains: dict[str, list[_Link]] = {}
    for patch in patches:
        for target in patch.targets:
            chains.setdefault(target.path, []).append(_Link(patch.name, target))
    return chains


def _version_problems(patches: Sequence[Patch], site_packages: Path) -> list[str]:
    installed = {
        canonicalize_name(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions(path=[str(site_packages)])
    }
    problems = []
    for patch in patches:
        version = installed.get(canonicalize_name(patch.package))
        if version is None:
            problems.append(f"`{patch.name}` is for `{patch.package}`, which is not installed")
        elif Version(version) not in patch.versions:
            problems.append(f"`{patch.name}` is for `{patch.package} {patch.versions}`, installed is `{version}`")
    return problems


def _advance(data: bytes, links: Sequence[_Link]) -> tuple[bytes, list[Applied]]:
    """Take a file from wherever it stands in its chain to the end."""
    for early, late in itertools.pairwise(links):
        if early.target.after != late.target.before:
            raise _RefusedError(
                f"`{late.patch}` was not written on top of `{early.patch}`, and both change `{late.target.path}`"
            )
    seen = sha256_bytes(data)
    states = [link.target.before for link in links] + [links[-1].target.after]
    if seen not in states:
        first = links[0]
        raise _RefusedError(
            f"`{first.patch}`: `{first.target.path}` has sha256 {seen}, the patch was written for {first.target.before}"
        )
    done = states.index(seen)
    for link in links[done:]:
        data = _rewrite(data, link)
    return data, [
        Applied(link.patch, link.target.path, link.target.before, link.target.after, already=index < done)
        for index, link in enumerate(links)
    ]


def _rewrite(data: bytes, link: _Link) -> bytes:
    """Apply one target's hunks at their exact lines."""
    lines, result, position = lines_of(data), list[bytes](), 0
    for hunk in link.target.hunks:
        start, end = hunk.line - 1, hunk.line - 1 + len(hunk.before)
        if tuple(lines[start:end]) != hunk.before:
            raise _RefusedError(f"`{link.patch}`: `{link.target.path}` line {hunk.line} is not what the patch expects")
        result += [*lines[position:start], *hunk.after]
        position = end
    after = b"".join([*result, *lines[position:]])
    if (seen := sha256_bytes(after)) != link.target.after:
        raise _RefusedError(
            f"`{link.patch}`: its hunks give `{link.target.path}` sha256 {seen}, its header says {link.target.after}"
        )
    return after


def _write(changes: Mapping[Path, tuple[bytes, bytes]]) -> None:
    """Replace files; by rename, so that a cache which the installer hard-linked them from keeps its own bytes."""
    written: list[Path] = []
    try:
        for file, (_, new) in changes.items():
            write_atomic(file, new, mode=stat.S_IMODE(file.stat().st_mode))
            written.append(file)
    except (HarnessError, OSError) as error:
        for file in written:
            with contextlib.suppress(HarnessError, OSError):
                write_atomic(file, changes[file][0], mode=stat.S_IMODE(file.stat().st_mode))
        raise BuildError(f"patches could not be written; nothing was changed: {error}") from error


def _digest(file: Path) -> str | None:
    try:
        return sha256_bytes(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def status(patch: Patch, read_target: ReadTarget, version: str) -> Status:
    """How a patch stands against another version of its package.

    *applies*: the bytes are those it was written for. *absorbed upstream*: the change is in already (the bytes after,
    the lines of every hunk, or what `Absorbed-When` looks for). *needs refresh*: the change still fits, at other lines,
    in a file that changed elsewhere, or for a version the header does not name. *conflict*: somebody must look.

    Args:
        patch: the patch.
        read_target: the files of that version, for instance `wheel_reader(...)`.
        version: that version.
    """
    if absorbed := _absorbed(patch, read_target):
        return Status(patch.name, "absorbed upstream", absorbed)
    found = [_target_status(target, read_target(target.path)) for target in patch.targets]
    states = {state for state, _ in found}
    reasons = [reason for _, reason in found if reason]
    state: State
    if "conflict" in states:
        state = "conflict"
    elif states == {"absorbed upstream"}:
        state = "absorbed upstream"
    elif states == {"applies"} and Version(version) in patch.versions:
        state = "applies"
    else:
        state = "needs refresh"
        if Version(version) not in patch.versions:
            reasons.append(f"`Applies-To` says {patch.package} {patch.versions}, this is {version}")
    return Status(patch.name, state, tuple(reasons))


def patched(patch: Patch, read_target: ReadTarget) -> ReadTarget:
    """The reader as it would be after this patch, for judging the next one; files it does not fit stay as they are."""
    targets = {target.path: target for target in patch.targets}

    def read(path: str) -> bytes | None:
        data = read_target(path)
        if data is None or path not in targets:
            return data
        with contextlib.suppress(_RefusedError):
            return _advance(data, [_Link(patch.name, targets[path])])[0]
        return data

    return read


def refreshed(patch: Patch, read_target: ReadTarget, version: str) -> Patch:
    """The same change written for another version: new lines, new sha256s, `Applies-To` that version alone.

    Raises:
        AnswerIsNo: the patch is absorbed or in conflict there; says which and why.
    """
    now = status(patch, read_target, version)
    if now.state in ("absorbed upstream", "conflict"):
        raise AnswerIsNo(
            f"`{patch.name}` cannot be refreshed for {patch.package} {version}: {now.state}", details=now.reasons
        )
    texts = {}
    for target in patch.targets:
        before = read_target(target.path) or b""
        after = _moved(before, _Link(patch.name, target))
        if after != before:  # else upstream has this file's part already
            texts[target.path] = (before, after)
    header = dataclasses.replace(
        patch,
        versions=SpecifierSet(f"=={version}", prereleases=True),
        absorbed_when=tuple(marker for marker in patch.absorbed_when if marker.path in texts),
    )
    return draft(header, texts)


def draft(patch: Patch, texts: Mapping[str, tuple[bytes, bytes]]) -> Patch:
    """A patch with this header whose targets are made from (bytes before, bytes after) by path."""
    targets = tuple(
        Target(path, sha256_bytes(before), sha256_bytes(after), _hunks(before, after))
        for path, (before, after) in texts.items()
    )
    made = dataclasses.replace(patch, targets=targets)
    return dataclasses.replace(made, sha256=sha256_bytes(render(made)))


def _absorbed(patch: Patch, read_target: ReadTarget) -> tuple[str, ...]:
    """Why a patch counts as absorbed by its own `Absorbed-When` lines; empty when it does not."""
    reasons = []
    for marker in patch.absorbed_when:
        data = read_target(marker.path)
        if data is None or not re.search(marker.regex, data.decode(errors="replace"), re.MULTILINE):
            return ()
        reasons.append(f"`{marker.path}` has `{marker.regex}`")
    return tuple(reasons)


def _target_status(target: Target, data: bytes | None) -> tuple[State, str]:
    if data is None:
        return "conflict", f"`{target.path}` is not there any more"
    seen = sha256_bytes(data)
    if seen == target.before:
        return "applies", ""
    if seen == target.after:
        return "absorbed upstream", f"`{target.path}` has the bytes the patch would give it"
    lines = lines_of(data)
    verdicts = [_hunk_status(hunk, lines) for hunk in target.hunks]
    for hunk, verdict in zip(target.hunks, verdicts, strict=True):
        if verdict == "conflict":
            return "conflict", f"`{target.path}`: the lines at {hunk.line} are not there as the patch knows them"
    if set(verdicts) == {"absorbed upstream"}:
        return "absorbed upstream", f"`{target.path}` has the patch's lines"
    return "needs refresh", f"`{target.path}` changed elsewhere (sha256 {seen[:12]}...); every hunk still fits once"


def _hunk_status(hunk: Hunk, lines: Sequence[bytes]) -> State:
    """The longer side decides first, because the shorter may be a piece of it."""
    old, new = _places(hunk.before, lines), _places(hunk.after, lines)
    if new and (not old or len(hunk.after) > len(hunk.before)):
        return "absorbed upstream"
    return "needs refresh" if len(old) == 1 else "conflict"


def _moved(data: bytes, link: _Link) -> bytes:
    """A target's change made to the file it was written for, or to one in which every hunk is in, or found once."""
    if sha256_bytes(data) == link.target.before:
        return _rewrite(data, link)
    lines = lines_of(data)
    for hunk in reversed(link.target.hunks):
        if _hunk_status(hunk, lines) == "absorbed upstream":
            continue
        start = _places(hunk.before, lines)[0]
        lines[start : start + len(hunk.before)] = hunk.after
    return b"".join(lines)


def _places(block: Sequence[bytes], lines: Sequence[bytes]) -> list[int]:
    """Where a block of lines stands (indices)."""
    size = len(block)
    return [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == tuple(block)]


def _hunks(before: bytes, after: bytes) -> tuple[Hunk, ...]:
    """The change with the least context in which every hunk stands in one place only: no more of their text."""
    old, new = lines_of(before), lines_of(after)
    hunks: tuple[Hunk, ...] = ()
    for context in range(1, MAX_CONTEXT + 1):
        # A new matcher each time: grouping shortens the opcodes it keeps.
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        hunks = tuple(
            Hunk(group[0][1] + 1, tuple(old[group[0][1] : group[-1][2]]), tuple(new[group[0][3] : group[-1][4]]))
            for group in matcher.get_grouped_opcodes(context)
        )
        if all(len(_places(hunk.before, old)) == 1 for hunk in hunks):
            break
    return hunks


def wheel_reader(wheel: Path) -> ReadTarget:
    """The files of a wheel by the path they get under site-packages, read by member; nothing is unpacked.

    Raises:
        InputError: on reading, when the file is not a wheel.
    """

    def read(path: str) -> bytes | None:
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = next((name for name in archive.namelist() if _SCHEME.sub("", name) == path), None)
                return archive.read(member) if member else None
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"cannot read the wheel `{wheel}`: {error}") from error

    return read
