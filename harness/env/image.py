"""A container image of an environment: a build context laid out from the lock, and one call of an image builder.

`Dockerfile.cuda13` says what is built. The context holds what it copies and nothing else, with one date on every file,
so that equal inputs give equal contexts and an unchanged layer comes from the builder's cache:

    tools/      the harness's own dependencies, as hashes
    packages/   the spec, its lock, patches and overlays; of the harness, what `harness build` runs
    rest/       the rest of the harness, and the rules
    wheels/     for tools and for packages; mounted while a layer is made
"""

import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import harness
from harness.env import fetch, overlay, places, spec
from harness.env import lock as locks
from harness.env.locked import Lock
from harness.env.spec import EnvSpec
from harness.env.wheelhouse import Progress, Silent, disk_hint
from harness.errors import BuildError, InputError, LockError

Engine = Literal["docker", "podman", "buildah"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
TOOLS = "harness"
"""The spec of what the harness itself runs on."""

_DOCKERFILE = "Dockerfile.cuda13"
# What `harness build` runs; a change anywhere else in the harness leaves the packages' layer as it is.
_BUILDING = ("__init__.py", "__main__.py", "errors.py", "files.py", "strict.py", "py.typed", "cli", "env")
_DATE = 315532800  # 1980-01-01, the first that every archive format can hold
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Source:
    """A spec's file, what it says, and its lock."""

    path: Path
    spec: EnvSpec
    lock: Lock


@dataclass(frozen=True, slots=True)
class Plan:
    """One image to build.

    Attributes:
        packages: the environment.
        tools: the harness's own dependencies.
        base: the base image's name.
        tag: the image's name.
        pythons: the versions, as `3.12`, whose wheels are offered; the base image's Python picks.
    """

    packages: Source
    tools: Source
    base: str
    tag: str
    pythons: tuple[str, ...]


def plan(name: str, *, base: str | None = None, tag: str | None = None, python: str | None = None) -> Plan:
    """What to build for a spec.

    Args:
        name: name or path of the spec.
        base: the base image, in place of the spec's.
        tag: the image's name; by default `harness/SPEC:` and the first 16 digits of its `env_id`.
        python: the base image's Python version, where it is known; the others' wheels are left out then.

    Raises:
        InputError: no base image, or a Python version that the lock or the harness is not for.
        LockError: a lock is missing or stale.
    """
    packages, tools = source(name), source(TOOLS)
    base = base or packages.spec.base_image
    if not base:
        raise InputError(
            f"`{packages.spec.env}` names no base image",
            hint="give one with `--base IMAGE`, or `base_image` in the spec",
        )
    both = [version for version in packages.lock.pythons if version in tools.lock.pythons]
    pythons = tuple(version for version in both if python in (None, version))
    if not pythons:
        asked = f"Python {python}" if python else f"Python {' or '.join(packages.lock.pythons)}"
        raise InputError(
            f"no image with {asked}: `{packages.spec.env}` and the harness have {' '.join(both) or 'none'}"
        )
    return Plan(packages, tools, base, tag or f"harness/{packages.spec.env}:{packages.lock.env_id[:16]}", pythons)


def source(name: str) -> Source:
    """A spec with its lock.

    Raises:
        LockError: the lock is missing, or does not say what the spec says.
    """
    path = places.spec_path(name)
    wanted, locked = spec.load(path), locks.read(places.lock_path(path))
    if differences := locks.check(wanted, locked):
        raise LockError(f"the lock of `{wanted.env}` is stale", details=differences, hint=f"run `harness lock {name}`")
    return Source(path, wanted, locked)


def arguments(wanted: Plan) -> dict[str, str]:
    """What the Dockerfile takes, by name."""
    return {
        "BASE_IMAGE": wanted.base,
        "SPEC": wanted.packages.spec.env,
        "ENV_ID": wanted.packages.lock.env_id,
        "SPEC_DIGEST": wanted.packages.lock.spec_digest,
        "HARNESS_VERSION": harness.__version__,
    }


def command(engine: Engine, wanted: Plan, context: str, id_file: str | None = None) -> list[str]:
    """The call of an image builder, in the words that all three know."""
    platform = wanted.packages.lock.wanted.platform
    words = [engine, "build", "--platform", f"{platform.os}/{_MACHINES[platform.arch]}"]
    words += [] if engine == "docker" else ["--layers"]  # docker caches layers unasked
    words += [word for name, value in arguments(wanted).items() for word in ("--build-arg", f"{name}={value}")]
    words += ["--iidfile", id_file] if id_file else []
    return [*words, "--tag", wanted.tag, "--file", f"{context}/{_DOCKERFILE}", context]


def variables(engine: Engine) -> Mapping[str, str]:
    """What an image builder needs in its environment: docker mounts a build's wheels with BuildKit only."""
    return {"DOCKER_BUILDKIT": "1"} if engine == "docker" else {}


def choose(asked: Engine | None = None) -> Engine:
    """The image builder asked for, or the first that this machine has.

    Raises:
        BuildError: the machine has it not.
    """
    for engine in (asked,) if asked else ENGINES:
        if shutil.which(engine):
            return engine
    raise BuildError(
        f"this machine has no {asked or ' and no '.join(ENGINES)}",
        hint="install it (Debian: `apt-get install buildah`), or use `--context DIR` and build on another machine",
    )


def build(wanted: Plan, engine: Engine, progress: Progress | None = None) -> str:
    """Build an image.

    Args:
        wanted: what to build.
        engine: with what.
        progress: hears every line the builder says.

    Returns:
        The image's id, as `sha256:...`.

    Raises:
        BuildError: a wheel could not be had, or the builder failed; its last lines are told. No context is left behind.
    """
    hears = progress or Silent()
    home = places.home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".image-", dir=home) as temporary:
            context, id_file = Path(temporary, "context"), Path(temporary, "image-id")
            lay_out(wanted, context, hears)
            _run(engine, command(engine, wanted, str(context), str(id_file)), hears)
            return id_file.read_text().strip()
    except OSError as error:
        raise BuildError(f"cannot build an image: {error}", hint=disk_hint(error)) from error


def _run(engine: Engine, words: Sequence[str], progress: Progress) -> None:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        words,
        env=os.environ | variables(engine),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        for line in running.stdout or ():
            last.append(line.rstrip())
            progress.say(last[-1])
    if running.returncode:
        raise BuildError(f"`{engine} build` failed with exit code {running.returncode}", details=list(last))


def lay_out(wanted: Plan, context: Path, progress: Progress | None = None) -> None:
    """Write a build context; wheels that the wheelhouse lacks are fetched.

    Raises:
        InputError: the folder is there already and not empty.
        BuildError: a wheel could not be had.
    """
    if context.exists() and any(context.iterdir()):
        raise InputError(f"`{context}` is not empty", hint="name a folder that is not there yet")
    project = places.project_root()
    for path, text in _texts(wanted).items():
        _write(context / path, text.encode())
    for target, origin in _copies(wanted, project):
        _write(context / target, origin.read_bytes())
    for folder, part in (("tools", wanted.tools), ("packages", wanted.packages)):
        wheels = fetch.fetch(part.lock, part.spec, places.wheelhouse(), wanted.pythons, progress)
        _link(wheels, context / "wheels" / folder)
    _date(context)


def _texts(wanted: Plan) -> dict[str, str]:
    return {"tools/requirements.txt": "".join(f"{line}\n" for line in requirements(wanted.tools.lock, wanted.pythons))}


def requirements(lock: Lock, pythons: Sequence[str]) -> Iterator[str]:
    """A lock as pip's requirements with hashes, for some Python versions."""
    for package in lock.packages:
        found = {python: artefact for python in pythons if (artefact := package.artefact(python))}
        if not found:
            continue
        marker = " or ".join(f'python_version == "{python}"' for python in found)
        hashes = sorted({f"--hash=sha256:{artefact.sha256}" for artefact in found.values()})
        yield " ".join([f"{package.name}=={package.version}", *([f"; {marker}"] if package.pythons else []), *hashes])


def _copies(wanted: Plan, project: Path) -> Iterator[tuple[str, Path]]:
    """Every file to copy, with its place in the context."""
    yield _DOCKERFILE, project / _DOCKERFILE
    for name, path in spec_files(wanted.packages):
        yield f"packages/project/envspecs/{name}", path
    package = Path(harness.__file__).parent
    for path in _files(package):
        inside = path.relative_to(package)
        part = "packages" if inside.parts[0] in _BUILDING else "rest"
        yield f"{part}/source/harness/{inside.as_posix()}", path
    rules = wanted.packages.spec.folder / "rules"
    for path in _files(rules):
        yield f"rest/project/envspecs/rules/{path.relative_to(rules).as_posix()}", path


def spec_files(packages: Source) -> Iterator[tuple[str, Path]]:
    """What a spec is made of, by its path beside it."""
    folder = packages.spec.folder
    for path in spec.lineage(packages.path):
        yield path.name, path
    lock = places.lock_path(packages.path)
    yield f"locks/{lock.name}", lock
    for name in packages.spec.patches:
        yield f"patches/{name}.patch", folder / "patches" / f"{name}.patch"
    for name in packages.spec.overlays:
        found = overlay.load(folder / "overlays" / name)
        for inside in ("overlay.yaml", *found.paths):
            yield f"overlays/{name}/{inside}", found.folder / inside


def _files(folder: Path) -> Iterator[Path]:
    """The files under a folder, sorted, without Python's bytecode."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _link(wheels: Iterable[Path], folder: Path) -> None:
    """Have wheels in a folder: they are large, so by another name for the same file where that can be."""
    folder.mkdir(parents=True)
    for wheel in wheels:
        try:
            (folder / wheel.name).hardlink_to(wheel)
        except OSError:
            shutil.copyfile(wheel, folder / wheel.name)


def _date(context: Path) -> None:
    """One date and one mode for all that is copied; wheels are mounted, and may be the wheelhouse's own files."""
    for path in (context, *context.rglob("*")):
        if path.is_dir() or "wheels" not in path.relative_to(context).parts[:1]:
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (_DATE, _DATE))
