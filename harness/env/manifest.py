"""What a build wrote down about itself: the mark that it is whole, and what the guard compares against.

`harness/manifest.json` inside the environment is written last; `harness/files.json` beside it lists every installed
file with its size and time, so that one pass over the folder tells whether a file was edited since.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from harness import files
from harness.env.locked import Lock
from harness.strict import Strict

Stamp = tuple[int, int]  # size in bytes, modification time in nanoseconds


class Manifest(Strict):
    """One finished build.

    Attributes:
        env_id: the lock's identity.
        env: the spec's name.
        harness: the version of the harness that built it.
        python_version: the interpreter's version, as `3.12.1`.
        packages: version by canonical name of every installed distribution, overlays included.
        patched: sha256 of every patched file, by its path under site-packages.
    """

    env_id: str
    env: str
    harness: str
    python_version: str
    packages: dict[str, str]
    patched: dict[str, str]


def path(environment: Path) -> Path:
    """Where an environment's manifest is."""
    return environment / "harness" / "manifest.json"


def read(environment: Path) -> Manifest | None:
    """The manifest of an environment; none when it was never finished."""
    try:
        return Manifest.model_validate_json(path(environment).read_bytes())
    except (OSError, ValidationError):
        return None


def write(environment: Path, manifest: Manifest, site_packages: Path) -> None:
    """Write the list of files, then the manifest, which makes the environment count as built."""
    stamps = dict(sorted(stamped(site_packages)))
    files.write_atomic(path(environment).with_name("files.json"), json.dumps(stamps, separators=(",", ":")))
    files.write_json(path(environment), manifest.model_dump(mode="json"))


def stamps(environment: Path) -> dict[str, Stamp] | None:
    """The files a build left, with size and time; none when the list cannot be read."""
    try:
        listed = json.loads(path(environment).with_name("files.json").read_bytes())
    except (OSError, ValueError):
        return None
    return {name: (stamp[0], stamp[1]) for name, stamp in listed.items()}


def stamped(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """Every file under a folder; not bytecode, which Python rewrites at will, nor RECORD, which installers rewrite."""
    start = len(str(folder)) + 1
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        waiting.append(entry.path)
                elif entry.name != "RECORD":
                    seen = entry.stat(follow_symlinks=False)
                    yield entry.path[start:], (seen.st_size, seen.st_mtime_ns)


def expected(lock: Lock, python: str) -> dict[str, str]:
    """Version by canonical name of what a lock installs for a Python version."""
    packages: dict[str, str] = {
        canonicalize_name(package.name): package.version for package, _ in lock.selected(python)
    }
    return packages | {canonicalize_name(overlay.name): overlay.version for overlay in lock.overlays}


def installed(site_packages: Path) -> Mapping[str, str]:
    """Version by canonical name of the distributions in a site-packages folder, by their dist-info folders' names."""
    found: dict[str, str] = {}
    for folder in site_packages.glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        found[canonicalize_name(name)] = version
    return found
