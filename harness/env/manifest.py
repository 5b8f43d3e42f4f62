"""What a build wrote down about itself: the mark that it is whole, and what the guard compares against.

`harness/manifest.json` inside the environment is written last; `harness/files.txt` beside it lists every installed file
with its size and time, so that one pass over the folder tells whether a file was edited since.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from harness import files
from harness.env.locked import Lock
from harness.strict import Strict


class Manifest(Strict):
    """One finished build.

    Attributes:
        env_id: the lock's identity.
        env: the spec's name.
        harness: the version of the harness that built it.
        python_version: the interpreter's version, as `3.12.1`.
        packages: version by canonical name of every installed distribution, overlays included.
        patched: sha256 of every patched file, by its path under site-packages.
        system_libraries: what it needs of the machine, by soname, and whether that could be loaded where it was built.
    """

    env_id: str
    env: str
    harness: str
    python_version: str
    packages: dict[str, str]
    patched: dict[str, str]
    system_libraries: dict[str, bool]


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
    files.write_atomic(path(environment).with_name("files.txt"), "\n".join(sorted(listing(site_packages))))
    files.write_json(path(environment), manifest.model_dump(mode="json"))


def listed(environment: Path) -> list[str] | None:
    """The `listing` a build left; none when it cannot be read."""
    try:
        return path(environment).with_name("files.txt").read_text().split("\n")
    except OSError:
        return None


def listing(folder: Path) -> Iterator[str]:
    """`PATH SIZE TIME` of every file under a folder; not of bytecode, which Python rewrites at will, nor of RECORD,
    which installers rewrite. Time is in whole seconds, as container layers keep it."""
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
                    yield f"{entry.path[start:]} {seen.st_size} {int(seen.st_mtime)}"


def sizes(lines: Iterable[str]) -> dict[str, int]:
    """Size in bytes by path, of lines of a `listing`."""
    return {name: int(size) for name, size, _ in (line.rsplit(" ", 2) for line in lines)}


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
