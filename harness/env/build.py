"""Build an environment from its lock, and from nothing else.

The wheels come from the wheelhouse, where they were verified; uv checks their hashes once more and installs them. A
virtual environment holds its own path, so it is built where it will stay, and its manifest is written last: a folder
without a manifest is no environment, and is cleared away by the next build.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uv

from harness import __version__
from harness.env import fetch, manifest, overlay, patch, patch_file, places, system_libraries
from harness.env import lock as locks
from harness.env.fetch import Progress, Silent
from harness.env.locked import Lock
from harness.env.manifest import Manifest
from harness.env.spec import EnvSpec, Platform
from harness.errors import BuildError, LockError


@dataclass(frozen=True, slots=True)
class Built:
    """A built environment.

    Attributes:
        path: its folder.
        python: its interpreter.
        site_packages: where its packages are.
        env_id: the lock's identity.
        python_version: its interpreter's version, as `3.12.1`.
        variables: environment variables a process in it is to have: the spec's, and where the JIT
            compilers keep their work.
    """

    path: Path
    python: Path
    site_packages: Path
    env_id: str
    python_version: str
    variables: Mapping[str, str]


def find(lock: Lock) -> Built | None:
    """The environment of a lock, if it was built; complete by its manifest."""
    path = places.environments() / lock.env_id[:16]
    found = manifest.read(path)
    if found is None or found.env_id != lock.env_id or not (path / "bin" / "python").exists():
        return None
    return _built(path, lock, found.python_version)


def build(
    lock: Lock,
    spec: EnvSpec,
    *,
    offline: bool = False,
    python: str | None = None,
    wheelhouse: Path | None = None,
    progress: Progress | None = None,
) -> Built:
    """Have the environment of a lock; nothing is done when it is there already.

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
    if found := find(lock):
        return found
    hears = progress or Silent()
    if differences := locks.check(spec, lock):
        raise LockError(
            f"the lock of `{spec.env}` is stale", details=differences[:20], hint=f"run `harness lock {spec.env}`"
        )
    check_platform(lock.wanted.platform)
    interpreter = _interpreter(lock, python)
    path = places.environments() / lock.env_id[:16]
    try:
        with fetch.locked(path.parent / f".{path.name}.lock", hears):
            return find(lock) or _build(
                lock, spec, _Target(path, interpreter, wheelhouse or places.wheelhouse(), offline), hears
            )
    except OSError as error:
        raise BuildError(f"cannot build in `{path.parent}`: {error.strerror}", hint=fetch.disk_hint(error)) from error


@dataclass(frozen=True, slots=True)
class _Target:
    path: Path
    interpreter: "Interpreter"
    wheelhouse: Path
    offline: bool


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python to build with: `version` as `3.12.1`."""

    path: str
    version: str

    @property
    def minor(self) -> str:
        """As `3.12`."""
        return ".".join(self.version.split(".")[:2])


def check_platform(wanted: Platform) -> None:
    """Refuse a machine that the lock is not for.

    Raises:
        BuildError: says what the machine is and what the lock wants.
    """
    hint = "locking works anywhere; build on such a machine, or in a container (`harness image`)"
    if not sys.platform.startswith(wanted.os):
        raise BuildError(f"this environment is for {wanted.os}, this machine runs {sys.platform}", hint=hint)
    if platform.machine() != wanted.arch:
        raise BuildError(f"this environment is for {wanted.arch}, this machine is {platform.machine()}", hint=hint)
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "no glibc").partition(" ")
    if name != "glibc" or _numbers(version) < _numbers(wanted.glibc):
        seen = f"{name} {version}"
        raise BuildError(f"this environment needs glibc {wanted.glibc} or newer, this machine has {seen}", hint=hint)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _interpreter(lock: Lock, asked: str | None) -> Interpreter:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if asked is None and running in lock.pythons:
        return _asked_version(sys.executable, lock)
    if asked is not None and (found := _uv_python(asked)):
        return _asked_version(found, lock)
    for version in () if asked else reversed(lock.pythons):
        if found := _uv_python(version):
            return _asked_version(found, lock)
    wanted = asked or " or ".join(lock.pythons)
    raise BuildError(
        f"no Python {wanted} on this machine, which `{lock.name}` needs",
        hint="install one (`uv python install`, or the system's packages), or name one with `--python`",
    )


def _uv_python(request: str) -> str | None:
    command = [uv.find_uv_bin(), "python", "find", "--no-project", "--no-python-downloads", request]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _asked_version(path: str, lock: Lock) -> Interpreter:
    code = "import platform; print(platform.python_version())"
    answer = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, check=False)
    found = Interpreter(path, answer.stdout.strip())
    if answer.returncode or found.minor not in lock.pythons:
        wanted = " or ".join(lock.pythons)
        raise BuildError(f"`{path}` is Python {found.version or '?'}, `{lock.name}` is locked for {wanted}")
    return found


def _build(lock: Lock, spec: EnvSpec, target: _Target, progress: Progress) -> Built:
    minor = target.interpreter.minor
    if not target.offline:
        progress.say(f"fetching {lock.name} for Python {minor}")
        fetch.fetch(lock, spec, target.wheelhouse, [minor], progress)
    wheels = fetch.verify(lock, target.wheelhouse, minor)
    _clear(target.path)
    try:
        progress.say(f"installing {len(wheels)} packages")
        _install(lock, target, wheels)
        built = _built(target.path, lock, target.interpreter.version)
        _finish(lock, spec, built, progress)
    except BaseException:
        shutil.rmtree(target.path, ignore_errors=True)
        raise
    return built


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
        raise BuildError(f"`uv {arguments[0]}` failed while building", details=lines[-20:])


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


def _built(path: Path, lock: Lock, python_version: str) -> Built:
    minor = ".".join(python_version.split(".")[:2])
    return Built(
        path=path,
        python=path / "bin" / "python",
        site_packages=path / "lib" / f"python{minor}" / "site-packages",
        env_id=lock.env_id,
        python_version=python_version,
        variables={**jit_variables(lock.env_id), **lock.wanted.variables},
    )


def jit_variables(env_id: str) -> dict[str, str]:
    """Where just-in-time compilers keep their work: a folder of this env_id's own, since a kernel compiled for one
    set of packages must never be loaded by another."""
    cache = places.jit_cache(env_id)
    return {
        "CUTE_DSL_CACHE_DIR": str(cache / "cute-dsl"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "SGLANG_JIT_CACHE_DIR": str(cache / "sglang"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch-extensions"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TVM_FFI_CACHE_DIR": str(cache / "tvm-ffi"),
    }
