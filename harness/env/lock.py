"""Make, read, write, check and compare locks.

A lock is made before, verified during, and never repaired silently: `make` is the only way to a new one, and it moves
no pin that still satisfies the spec unless it is told to.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import files
from harness.env import overlay, patch_file, places
from harness.env.locked import (
    VERSION,
    Artefact,
    Lock,
    LockedOverlay,
    LockedPackage,
    LockedPatch,
    PatchTarget,
    assemble,
    render,
)
from harness.env.resolve import Upgrade, resolve
from harness.env.spec import EnvSpec, Wanted
from harness.errors import LockError

__all__ = ["Artefact", "Lock", "LockedPackage", "Upgrade", "check", "diff", "make", "read", "read_for", "write"]

_KEEP = Upgrade()


def make(spec: EnvSpec, old: Lock | None = None, upgrade: Upgrade = _KEEP) -> Lock:
    """Resolve a spec to a lock.

    Args:
        spec: what is wanted.
        old: the lock there is; its pins stay where they still fit.
        upgrade: pins that may move.

    Raises:
        InputError: the packages do not go together, an index cannot be reached, a patch or overlay is wrong.
        LockError: something has no sha256, no size, or no wheel.
    """
    overlays, patches = _overlays(spec), _patches(spec)
    return assemble(spec.wanted(), resolve(spec, old, upgrade), overlays, patches)


def _overlays(spec: EnvSpec) -> list[LockedOverlay]:
    found = [overlay.load(spec.folder / "overlays" / name) for name in spec.overlays]
    return [
        LockedOverlay(overlay=item.folder.name, name=item.name, version=item.version, sha256=item.sha256)
        for item in found
    ]


def _patches(spec: EnvSpec) -> list[LockedPatch]:
    return [
        LockedPatch(
            name=patch.name,
            sha256=patch.sha256,
            targets=tuple(PatchTarget(path=t.path, before=t.before, after=t.after) for t in patch.targets),
        )
        for patch in patch_file.load_named(spec.folder / "patches", spec.patches)
    ]


def check(spec: EnvSpec, lock: Lock) -> list[str]:
    """What the spec, its patches or its overlays now say that the lock does not; empty when the lock is current."""
    there = assemble(spec.wanted(), lock.packages, _overlays(spec), _patches(spec))
    return diff(lock, there)


def diff(before: Lock, after: Lock) -> list[str]:
    """What differs between two locks, a line each, in words."""
    return [
        *_wanted_changes(before.wanted, after.wanted),
        *_package_changes(before.packages, after.packages),
        *_named_changes("overlay", _digests(before.overlays, "overlay"), _digests(after.overlays, "overlay")),
        *_named_changes("patch", _digests(before.patches, "name"), _digests(after.patches, "name")),
    ]


def _wanted_changes(before: Wanted, after: Wanted) -> Iterator[str]:
    old, new = _flat(before), _flat(after)
    for key in sorted({*old, *new}):
        if old.get(key) == new.get(key):
            continue
        if key not in old:
            yield f"{key} added: {new[key]}"
        elif key not in new:
            yield f"{key} removed: {old[key]}"
        else:
            yield f"{key}: {old[key]} -> {new[key]}"


def _flat(wanted: Wanted) -> dict[str, str]:
    """What is wanted as one text per thing; lists of names become one entry a name."""
    flat = {f"package {package.canonical_name}": str(package) for package in wanted.packages}
    for name, value in wanted.model_dump(mode="json", exclude={"packages"}, exclude_none=True).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": part if isinstance(part, str) else ", ".join(part) for key, part in value.items()}
        elif isinstance(value, list):
            flat |= {f"{name} {item}": "asked for" for item in value}
        else:
            flat[name] = str(value)
    return flat


def _package_changes(before: Sequence[LockedPackage], after: Sequence[LockedPackage]) -> Iterator[str]:
    old, new = _versions(before), _versions(after)
    for name in sorted({*old, *new}):
        if name not in old:
            yield f"{name} {' and '.join(new[name])} is new"
        elif name not in new:
            yield f"{name} {' and '.join(old[name])} is gone"
        elif list(old[name]) != list(new[name]):
            yield f"{name} {' and '.join(old[name])} -> {' and '.join(new[name])}"
        elif old[name] != new[name]:
            yield f"{name} {' and '.join(new[name])}: same version, other files"


def _versions(packages: Sequence[LockedPackage]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for package in packages:
        found.setdefault(package.name, {})[package.version] = [(file.file, file.sha256) for file in package.files]
    return found


def _digests(items: Sequence[LockedOverlay | LockedPatch], key: str) -> dict[str, str]:
    return {str(getattr(item, key)): files.digest(item.model_dump(mode="json")) for item in items}


def _named_changes(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in old:
            yield f"{kind} `{name}` is new"
        elif name not in new:
            yield f"{kind} `{name}` is gone"
        elif old[name] != new[name]:
            yield f"{kind} `{name}` has other contents"


def read(path: Path) -> Lock:
    """Read a lock.

    Raises:
        LockError: it is missing, not a lock, of another version, or was edited by hand.
    """
    name = path.name.removesuffix(".lock.toml")
    remake = f"run `harness lock {name}`"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LockError(f"there is no lock `{path}`", hint=remake) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LockError(f"cannot read the lock `{path}`: {error}", hint=remake) from error
    if data.get("version") != VERSION:
        raise LockError(
            f"`{path}` is a lock of version {data.get('version')}, this harness reads {VERSION}", hint=remake
        )
    try:
        lock = Lock.model_validate_json(json.dumps(data))
    except ValidationError as error:
        details = [f"`{'.'.join(map(str, item['loc']))}`: {item['msg']}" for item in error.errors()[:5]]
        raise LockError(f"`{path}` is not a lock", details=details, hint=remake) from error
    if lock.computed_id() != lock.env_id or lock.wanted.digest != lock.spec_digest:
        raise LockError(f"`{path}` was changed by hand: its contents do not give its `env_id`", hint=remake)
    return lock


def read_for(name_or_path: str) -> Lock:
    """The lock of a spec's name or path."""
    return read(places.lock_path(name_or_path))


def write(path: Path, lock: Lock) -> None:
    """Write a lock: equal locks give equal bytes."""
    files.write_atomic(path, render(lock))
