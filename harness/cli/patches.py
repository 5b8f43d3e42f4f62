"""Verb: patch status, new, refresh."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, Verbs, common
from harness.errors import InputError, LockError

if TYPE_CHECKING:
    from harness.env.locked import Lock
    from harness.env.patch import Drift, ReadTarget, Status
    from harness.env.patch_file import Patch
    from harness.env.spec import EnvSpec


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    verb = verbs.add_parser(
        "patch",
        help="say how a spec's patches stand against its lock; write and refresh patches",
        description="Patches are bound to the bytes they were written for. docs/patches.md tells the format, and "
        "what to do at an upgrade.",
    )
    actions = verb.add_subparsers(title="actions", metavar="ACTION", required=True)
    _register_status(actions)
    _register_new(actions)
    _register_refresh(actions)


def _register_status(actions: Verbs) -> None:
    action = common(
        actions.add_parser(
            "status",
            help="per patch: applies, needs refresh, absorbed upstream or conflict",
            description="Judge every patch of a spec against the version in its lock, and say whether the built "
            "environment still has its bytes. Exit code 1 when a patch does not simply apply, or a patched file was "
            "edited.",
        )
    )
    action.add_argument("spec", metavar="SPEC", help="name or path of a spec")
    action.add_argument(
        "--against", type=Path, action="append", default=[], metavar="WHEEL", help="judge against this wheel instead"
    )
    action.set_defaults(run=run_status)


def _register_new(actions: Verbs) -> None:
    action = common(
        actions.add_parser(
            "new",
            help="write a patch from edited copies of a wheel's files",
            description="Compare the files under DIR (by their paths in the wheel) with the wheel's own and write a "
            "patch with no more context than makes every place unambiguous.",
        )
    )
    action.add_argument("name", metavar="NAME", help="the patch is envspecs/patches/NAME.patch")
    action.add_argument("--against", type=Path, required=True, metavar="WHEEL", help="the wheel it is for")
    action.add_argument("--edited", type=Path, required=True, metavar="DIR", help="folder with the edited files")
    action.add_argument("--on-top-of", action="append", default=[], metavar="PATCH", help="applied before this one")
    action.add_argument("--description", required=True, help="what it achieves, and what it does not")
    action.add_argument("--origin", required=True, help="who wrote it, or where it is from")
    action.add_argument("--upstream", action="append", default=[], metavar="URL", help="pull request or issue")
    action.add_argument("--remove-when", required=True, help="what makes it superfluous")
    action.add_argument(
        "--absorbed-when", action="append", default=[], metavar="'PATH REGEX'", help="text that shows upstream has it"
    )
    action.add_argument(
        "--probe", action="append", required=True, metavar="'KIND TEXT'", help="`log REGEX` or `python STATEMENT`"
    )
    action.set_defaults(run=run_new)


def _register_refresh(actions: Verbs) -> None:
    action = common(
        actions.add_parser(
            "refresh",
            help="rewrite a patch for another version of its package",
            description="Move every hunk to where its lines now stand, with new line numbers and sha256s. Exit code 1 "
            "when the patch is absorbed upstream or in conflict there.",
        )
    )
    action.add_argument("name", metavar="NAME", help="a patch in envspecs/patches")
    action.add_argument("--against", type=Path, required=True, metavar="WHEEL", help="the wheel of the new version")
    action.add_argument("--on-top-of", action="append", default=[], metavar="PATCH", help="applied before this one")
    action.add_argument("--to", metavar="NAME", help="write it under another name, and leave the old one")
    action.set_defaults(run=run_refresh)


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of one package in one version."""

    version: str
    read: "ReadTarget"
    file: str


def run_status(arguments: argparse.Namespace) -> int:
    """Judge the patches of a spec; 1 when any of them needs a person."""
    from harness.env import patch_file, places, spec

    wanted = spec.load(places.spec_path(arguments.spec))
    patches = patch_file.load_named(wanted.folder / "patches", wanted.patches)
    sources = dict(map(_of_wheel, arguments.against))
    lock = None if arguments.against else _lock(arguments.spec)
    for package in sorted({patch.package for patch in patches} - set(sources)):
        sources[package] = _locked(package, lock, wanted, arguments.talk)
    found = _judged(patches, sources)
    drift = _drift(patches, lock)
    arguments.talk.data(*_answer(patches, found, sources, drift))
    return int(any(one.state != "applies" for one in found) or any(drift or ()))


def _judged(patches: Sequence["Patch"], sources: dict[str, _Source]) -> list["Status"]:
    """Each patch against its package as the patches before it leave it."""
    from harness.env import patch as patching

    readers = {name: source.read for name, source in sources.items()}
    found = []
    for patch in patches:
        found.append(patching.status(patch, readers[patch.package], sources[patch.package].version))
        readers[patch.package] = patching.patched(patch, readers[patch.package])
    return found


def _drift(patches: Sequence["Patch"], lock: "Lock | None") -> "list[Drift] | None":
    """What the built environment's patched files lack; None where none is built."""
    from harness.env import build
    from harness.env import patch as patching

    built = build.find(lock) if lock is not None else None
    return patching.verify(patches, built.site_packages) if built else None


def _answer(
    patches: Sequence["Patch"], found: Sequence["Status"], sources: dict[str, _Source], drift: "list[Drift] | None"
) -> tuple[list[dict[str, Any]], str]:
    """The answer as data, and as people read it."""
    rows = [
        {
            "patch": patch.name,
            "state": one.state,
            "reasons": list(one.reasons),
            "package": patch.package,
            "version": sources[patch.package].version,
            "against": sources[patch.package].file,
            "built": _built_state(patch, drift),
        }
        for patch, one in zip(patches, found, strict=True)
    ]
    return rows, _shown(rows) if rows else "this spec has no patches"


def _built_state(patch: "Patch", drift: "list[Drift] | None") -> str | None:
    """How a patch stands in the built environment: `in place`, what is wrong, or None where none is built."""
    if drift is None:
        return None
    targets = {target.path for target in patch.targets}
    return "; ".join(item.message for item in drift if item.path in targets) or "in place"


def _shown(rows: Sequence[dict[str, Any]]) -> str:
    """One line a patch, its reasons under it."""
    width = max(len(row["patch"]) for row in rows)
    lines = []
    for row in rows:
        built = f", built environment: {row['built']}" if row["built"] else ""
        lines.append(f"{row['patch']:<{width}}  {row['state']:<17}  {row['package']} {row['version']}{built}")
        lines += [f"    {reason}" for reason in row["reasons"]]
    return "\n".join(lines)


def _lock(name: str) -> "Lock":
    from harness.env import lock as locks
    from harness.env import places

    try:
        return locks.read(places.lock_path(name))
    except LockError as error:
        hint = f"{error.hint}, or judge against a wheel with --against"
        raise LockError(error.message, details=error.details, hint=hint) from error


def _locked(package: str, lock: "Lock | None", wanted: "EnvSpec", talk: Talk) -> _Source:
    """A package's wheel as the lock names it, fetched into the wheelhouse when it is not there yet."""
    from harness.env import fetch, places
    from harness.env import patch as patching

    if lock is None:
        raise InputError(
            f"none of the wheels given is `{package}`", hint="give --against once for every patched package"
        )
    locked = next((item for item in lock.packages if item.name == package), None)
    artefact = next((file for python in lock.pythons if locked and (file := locked.artefact(python))), None)
    if locked is None or artefact is None:
        raise LockError(f"the lock `{lock.name}` holds no `{package}`, which a patch is for")
    wheel = places.wheelhouse() / artefact.file
    if not wheel.is_file():
        talk.line(f"fetching {artefact.file}, {artefact.size / 1e6:.1f} MB")
    fetch.fetch(lock.model_copy(update={"packages": (locked,)}), wanted, places.wheelhouse(), _pythons(lock, artefact))
    return _Source(locked.version, patching.wheel_reader(wheel), artefact.file)


def _pythons(lock: "Lock", artefact: Any) -> list[str]:
    """One Python version that gets this file: the others' files are not needed to judge a patch."""
    return [next(python for python in lock.pythons if not artefact.pythons or python in artefact.pythons)]


def _of_wheel(wheel: Path) -> tuple[str, _Source]:
    """Package name and source of a wheel file."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    from harness.env import patch as patching

    if not wheel.is_file():
        raise InputError(f"there is no wheel `{wheel}`")
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise InputError(f"`{wheel.name}` is not the name of a wheel: {error}") from error
    return str(name), _Source(str(version), patching.wheel_reader(wheel), wheel.name)


def run_new(arguments: argparse.Namespace) -> int:
    """Write a patch from edited files."""
    from packaging.specifiers import SpecifierSet

    from harness.env import patch as patching
    from harness.env.patch_file import Marker, Patch, Probe

    name, source = _of_wheel(arguments.against)
    target = _patch_path(arguments.name)
    if target.exists():
        raise InputError(f"there is a patch `{arguments.name}` already", hint="`harness patch refresh` rewrites one")
    header = Patch(
        name=arguments.name,
        sha256="",
        description=arguments.description,
        origin=arguments.origin,
        upstream=tuple(arguments.upstream),
        package=name,
        versions=SpecifierSet(f"=={source.version}", prereleases=True),
        targets=(),
        absorbed_when=tuple(Marker(*_pair(text)) for text in arguments.absorbed_when),
        remove_when=arguments.remove_when,
        # Whether the kind is one there is, `_write` sees with everything else.
        probes=tuple(Probe(kind, text) for kind, text in map(_pair, arguments.probe)),  # type: ignore[arg-type]
    )
    texts = _edited(arguments.edited, _below(arguments.on_top_of, source.read))
    _write(target, patching.draft(header, texts), arguments.talk)
    return 0


def run_refresh(arguments: argparse.Namespace) -> int:
    """Rewrite a patch for another version."""
    from harness.env import patch as patching

    name, source = _of_wheel(arguments.against)
    (old,) = _named([arguments.name])
    if old.package != name:
        raise InputError(f"`{old.name}` is for `{old.package}`, the wheel is `{name}`")
    fresh = patching.refreshed(old, _below(arguments.on_top_of, source.read), source.version)
    _write(_patch_path(arguments.to or arguments.name), fresh, arguments.talk)
    return 0


def _named(names: Sequence[str]) -> "tuple[Patch, ...]":
    from harness.env import patch_file, places

    return patch_file.load_named(places.specs_folder() / "patches", names)


def _below(names: Sequence[str], read: "ReadTarget") -> "ReadTarget":
    """A reader as some patches leave it."""
    from harness.env import patch as patching

    for patch in _named(names):
        read = patching.patched(patch, read)
    return read


def _patch_path(name: str) -> Path:
    from harness.env import places

    if "/" in name:
        raise InputError(f"`{name}` is not a patch name", hint="a name like `sm120-tables`, without folder or suffix")
    return places.specs_folder() / "patches" / f"{name.removesuffix('.patch')}.patch"


def _edited(folder: Path, read: "ReadTarget") -> dict[str, tuple[bytes, bytes]]:
    """Bytes before and after of every edited file.

    Raises:
        InputError: a file is not in the wheel, or none is changed; all such files at once.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    texts, strangers = {}, []
    for file in files:
        path = file.relative_to(folder).as_posix()
        before, after = read(path), file.read_bytes()
        if before is None:
            strangers.append(f"`{path}` is not in the wheel")
        elif before != after:
            texts[path] = (before, after)
    if strangers:
        raise InputError(f"not every file under `{folder}` has its like in the wheel", details=strangers)
    if not texts:
        raise InputError(
            f"nothing under `{folder}` differs from the wheel", hint="edit a copy of the wheel's file there"
        )
    return texts


def _pair(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest.strip()


def _write(path: Path, patch: "Patch", talk: Talk) -> None:
    """Write a patch, once its file reads as a patch: what `new` is given on the command line may be wrong."""
    from harness.env import patch_file
    from harness.files import sha256_bytes, write_atomic

    raw = patch_file.render(patch)
    patch_file.parse(raw, path.stem, str(path))
    write_atomic(path, raw)
    answer = {"patch": path.name.removesuffix(".patch"), "sha256": sha256_bytes(raw), "path": str(path)}
    talk.data(answer, str(path))
