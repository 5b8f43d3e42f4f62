"""Build an environment from its lock, and from nothing else.

The wheels come from the wheelhouse, where they were verified; uv checks their hashes once more and installs them. A
virtual environment holds its own path, so it is built where it will stay, and its manifest is written last: a folder
without a manifest is no environment, and is cleared away by the next build.
"""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uv

from harness import __version__
from harness.env import guard, interpreter, manifest, overlay, patch, patch_file, places, system_libraries
from harness.env import lock as locks
from harness.env.built import Built, built_at, find
from harness.env.interpreter import Interpreter
from harness.env.locked import Lock
from harness.env.manifest import Manifest
from harness.env.spec import EnvSpec
from harness.env.wheelhouse import Progress, Silent, disk_hint, locked, verify
from harness.errors import BuildError, LockError

__all__ = ["Built", "build", "find", "sound"]


def sound(lock: Lock, python: str | None = None, progress: Progress | None = None) -> Built | None:
    """The environment of a lock, if it was built and still holds what the lock says.

    Args:
        lock: what it shall hold.
        python: the interpreter it must have been built with, if that matters.
        progress: hears why a built environment is not sound.
    """
    found = find(lock)
    if found is None:
        return None
    drifts = [str(drift) for drift in guard.check(found, lock)]
    if python is not None and (asked := interpreter.choose(lock, python).version) != found.python_version:
        drifts.append(f"built with Python {found.python_version}, asked for {asked}")
    if drifts and progress is not None:
        more = f" and {len(drifts) - 1} more" if drifts[1:] else ""
        progress.say(f"built before, but not as it should be ({drifts[0]}{more}); building it anew")
    return None if drifts else found


def build(
    lock: Lock,
    spec: EnvSpec,
    *,
    offline: bool = False,
    python: str | None = None,
    wheelhouse: Path | None = None,
    progress: Progress | None = None,
) -> Built:
    """Have the environment of a lock; nothing is done when it is there already and sound.

    Args:
        lock: what it shall hold.
        spec: where the indexes, patches and overlays are.
        offline: take every file from the wheelhouse.
        python: the interpreter to use; by default one that fits is found.
        wheelhouse: the folder of wheels; the project's own by default.
        progress: hears of it.

    Raises:
        LockError: the lock is not of this spec as it stands.
        BuildError: this machine cannot hold it, a file is missing or wrong, or installing failed.
            Nothing is left behind.
    """
    if found := sound(lock, python):
        return found
    hears = progress or Silent()
    if differences := locks.check(spec, lock):
        raise LockError(
            f"the lock of `{spec.env}` is stale", details=differences[:20], hint=f"run `harness lock {spec.env}`"
        )
    interpreter.check_platform(lock.wanted.platform)
    path = places.environments() / lock.env_id[:16]
    target = _Target(path, interpreter.choose(lock, python), wheelhouse or places.wheelhouse(), offline)
    try:
        with locked(path.parent / f".{path.name}.lock", hears):
            return sound(lock, python, hears) or _build(lock, spec, target, hears)
    except OSError as error:
        raise BuildError(f"cannot build in `{path.parent}`: {error.strerror}", hint=disk_hint(error)) from error


def lacking(built: Built) -> list[str]:
    """Libraries that an environment needs of the machine, by soname, and that could not be loaded when it was built."""
    made = manifest.read(built.path)
    return sorted(name for name, loaded in made.system_libraries.items() if not loaded) if made else []


@dataclass(frozen=True, slots=True)
class _Target:
    path: Path
    interpreter: Interpreter
    wheelhouse: Path
    offline: bool


def _build(lock: Lock, spec: EnvSpec, target: _Target, progress: Progress) -> Built:
    wheels = _wheels(lock, spec, target, progress)
    _clear(target.path)
    try:
        progress.say(f"installing {len(wheels)} packages")
        _install(lock, target, wheels)
        built = built_at(target.path, lock, target.interpreter.version)
        _finish(lock, spec, built, progress)
    except BaseException:
        shutil.rmtree(target.path, ignore_errors=True)
        raise
    return built


def _wheels(lock: Lock, spec: EnvSpec, target: _Target, progress: Progress) -> list[Path]:
    """The verified files to install."""
    minor = target.interpreter.minor
    if target.offline:
        return verify(lock, target.wheelhouse, minor)
    from harness.env.fetch import fetch  # noqa: PLC0415  (an HTTP client, which a finished build must not cost)

    progress.say(f"fetching {lock.name} for Python {minor}")
    return fetch(lock, spec, target.wheelhouse, [minor], progress)


def _clear(path: Path) -> None:
    """Remove what an interrupted build left; the manifest goes first, so that no half is taken for a whole."""
    manifest.path(path).unlink(missing_ok=True)
    for left in (path, *path.parent.glob(f".{path.name}-*")):
        if left.exists():
            shutil.rmtree(left)


def _install(lock: Lock, target: _Target, wheels: Sequence[Path]) -> None:
    """A virtual environment with the lock's wheels. uv's cache is one of its own: files are linked from it into place,
    so that a shared cache would let an edit in one environment reach every other."""
    with tempfile.TemporaryDirectory(prefix=f".{target.path.name}-", dir=target.path.parent) as temporary:
        scratch = Path(temporary)
        links = scratch / "wheels"
        links.mkdir()
        for wheel in wheels:
            (links / wheel.name).symlink_to(wheel.resolve())
        common = ["--no-config", "--offline", "--cache-dir", str(scratch / "cache"), "--quiet", "--color", "never"]
        _run_uv(["venv", "--python", target.interpreter.path, "--no-project", *common, str(target.path)])
        into = ["--python", str(target.path / "bin" / "python"), "--no-index", "--find-links", str(links), "--no-deps"]
        into += ["--require-hashes", "--link-mode", "hardlink", *common]
        ready, sources = _requirements(lock, target.interpreter.minor)
        # Sources are built with the packages just installed, so that what builds them is in the lock as well.
        for text, how in ((ready, "--no-build"), (sources, "--no-build-isolation")):
            if text:
                (scratch / "requirements.txt").write_text(text)
                _run_uv(["pip", "install", *into, how, "--requirement", str(scratch / "requirements.txt")])


def _requirements(lock: Lock, python: str) -> tuple[str, str]:
    """What to install, with its hashes: wheels, and apart from them source distributions."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for package, artefact in lock.selected(python):
        line = f"{package.name}=={package.version} --hash=sha256:{artefact.sha256}\n"
        lines[artefact.file.endswith(".whl")].append(line)
    return "".join(lines[True]), "".join(lines[False])


def _run_uv(arguments: Sequence[str]) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("UV_") and name != "VIRTUAL_ENV"
    }
    answer = subprocess.run(
        [uv.find_uv_bin(), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        full = OSError(errno.ENOSPC, "") if "No space left on device" in answer.stderr else OSError()
        raise BuildError(f"`uv {arguments[0]}` failed while building", details=lines[-20:], hint=disk_hint(full))


def _finish(lock: Lock, spec: EnvSpec, built: Built, progress: Progress) -> None:
    """Overlays, patches, the check of what came out, and the manifest as the mark that all of it was done."""
    for name in spec.overlays:
        overlay.install(overlay.load(spec.folder / "overlays" / name), built.site_packages)
    if spec.patches:
        progress.say(f"applying {len(spec.patches)} patches")
        patch.apply(patch_file.load_named(spec.folder / "patches", spec.patches), built.site_packages)
    expected = manifest.expected(lock, ".".join(built.python_version.split(".")[:2]))
    progress.say("noting what it needs of the machine")
    needed = system_libraries.needed(built.site_packages)
    unloadable = system_libraries.unloadable(built.python, needed)
    made = Manifest(
        env_id=lock.env_id,
        env=lock.name,
        harness=__version__,
        python_version=built.python_version,
        packages=expected,
        patched={target.path: target.after for item in lock.patches for target in item.targets},
        system_libraries={name: name not in unloadable for name in needed},
    )
    if installed := manifest.installed(built.site_packages).keys() ^ expected.keys():
        raise BuildError("what was installed is not what the lock names", details=sorted(installed))
    manifest.write(built.path, made, built.site_packages)
