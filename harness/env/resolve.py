"""Ask uv which packages a spec leads to, and keep of its answer what a lock needs.

uv gets a project made up for the purpose: the spec's packages, its rules, and (so that pins which still fit stay) the
old lock's versions as preferences. No wheel is downloaded; a source distribution is built only where the spec allows
it.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import uv
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from harness import files
from harness.env import indexes, toml
from harness.env.indexes import Index
from harness.env.locked import Artefact, Lock, LockedPackage
from harness.env.spec import DEFAULT_INDEX, EnvSpec, Package, Platform, marker_holds
from harness.errors import InputError, LockError

_PROJECT = "harness-environment"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Which pins may move though they still fit: all of them, or those of some packages."""

    everything: bool = False
    packages: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether any pin may move."""
        return self.everything or bool(self.packages)


def resolve(spec: EnvSpec, old: Lock | None, upgrade: Upgrade) -> list[LockedPackage]:
    """The packages a spec leads to, sorted by name.

    Args:
        spec: what is wanted.
        old: the lock there is; its pins stay where they fit.
        upgrade: pins that may move.

    Raises:
        InputError: the spec asks for what cannot be had together, or an index cannot be reached.
        LockError: an artefact has no sha256 or no size, or a package has no file for the platform.
    """
    sources = _sources(spec)
    with tempfile.TemporaryDirectory(prefix="harness-lock-") as temporary:
        project = Path(temporary)
        (project / "pyproject.toml").write_text(_project(spec, sources))
        if old is not None and not upgrade.everything:
            (project / "uv.lock").write_text(_preferences(old, sources, upgrade))
        _run_uv(["lock"], project, spec, sources)
        _run_uv(
            ["export", "--frozen", "--format", "pylock.toml", "--no-emit-project", "-o", "pylock.toml"],
            project,
            spec,
            sources,
        )
        answer = tomllib.loads((project / "uv.lock").read_text())
        markers = tomllib.loads((project / "pylock.toml").read_text())
    return _packages(spec, answer, markers, sources)


def _sources(spec: EnvSpec) -> dict[str, Index]:
    """The index of every package that names one, by package name; a folder of wheels that holds the pin stands in."""
    found = {}
    for package in spec.packages:
        if package.index not in (None, DEFAULT_INDEX):
            mirror = _mirror(package, spec)
            found[package.canonical_name] = (
                Index(str(package.index), str(mirror))
                if mirror
                else indexes.locate(str(package.index), spec.indexes, spec.folder)
            )
    return found


def _default() -> Index:
    return indexes.locate(DEFAULT_INDEX, {}, Path())


def _mirror(package: Package, spec: EnvSpec) -> Path | None:
    """A folder of wheels on this machine that holds a pin for every Python version of the spec."""
    for folder in indexes.wheel_folders():
        wheels = [{"path": path.name} for path in folder.glob("*.whl") if _is_pin(path.name, package)]
        if all(_best_wheel(wheels, python, spec.platform) for python in spec.pythons):
            return folder
    return None


def _is_pin(file: str, package: Package) -> bool:
    try:
        name, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return name == package.canonical_name and str(version) == package.version


def _project(spec: EnvSpec, sources: Mapping[str, Index]) -> str:
    """The made-up project's `pyproject.toml`."""
    settings: dict[str, Any] = {
        "package": False,
        "no-build": not any(package.sdist for package in spec.packages),
        "fork-strategy": "fewest",
        "environments": [_environment(spec)],
        "constraint-dependencies": spec.constraints,
        "override-dependencies": spec.overrides,
        "exclude-dependencies": spec.exclude,
        "dependency-metadata": [
            {"name": package.name, "requires-dist": package.dependencies}
            for package in spec.packages
            if package.dependencies is not None
        ],
        "index": [_index_entry(index) for index in dict.fromkeys(sources.values())],
        "sources": {name: {"index": _uv_name(index)} for name, index in sources.items()},
    }
    project = {
        "name": _PROJECT,
        "version": "0",
        # The interpreter at hand must satisfy this, and need not be the one locked for: `environments` says that.
        "requires-python": ">=3.11",
        "dependencies": [package.requirement for package in spec.packages],
    }
    return "\n".join(["[project]", *toml.pairs(project), "[tool.uv]", *toml.pairs(settings)]) + "\n"


def _environment(spec: EnvSpec) -> str:
    pythons = " or ".join(
        f"(python_full_version >= '{python}' and python_full_version < '3.{int(python[2:]) + 1}')"
        for python in spec.pythons
    )
    return (
        f"({pythons}) and sys_platform == '{spec.platform.os}' and platform_machine == '{spec.platform.arch}'"
        " and platform_python_implementation == 'CPython'"
    )


def _index_entry(index: Index) -> dict[str, Any]:
    flat = {"format": "flat"} if index.folder else {}
    return {"name": _uv_name(index), "url": index.address, "explicit": True, **flat}


def _uv_name(index: Index) -> str:
    # Folders get a name of their own each: one index may be mirrored by several.
    return f"{index.name}-{files.sha256_bytes(index.address.encode())[:8]}" if index.folder else index.name


def _preferences(old: Lock, sources: Mapping[str, Index], upgrade: Upgrade) -> str:
    """The old lock's pins in the form of a uv lock, which uv takes as preferences."""
    default = _default().address
    lines = ["version = 1", 'requires-python = ">=3.11"', "[options]", 'fork-strategy = "fewest"']
    for package in old.packages:
        if package.name in upgrade.packages:
            continue
        address = sources[package.name].address if package.name in sources else default
        pin = {"name": package.name, "version": package.version, "source": {"registry": address}}
        lines += ["[[package]]", *toml.pairs(pin)]
    return (
        "\n".join([*lines, "[[package]]", f'name = "{_PROJECT}"', 'version = "0"', 'source = { virtual = "." }']) + "\n"
    )


def _run_uv(arguments: Sequence[str], project: Path, spec: EnvSpec, sources: Mapping[str, Index]) -> None:
    command = [uv.find_uv_bin(), *arguments, "--no-progress", "--color", "never", "--python", sys.executable]
    answer = subprocess.run(
        command,
        cwd=project,
        env=_uv_environment(),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if answer.returncode:
        raise _explained(answer.stderr, spec, sources)


def _uv_environment() -> dict[str, str]:
    """The caller's environment without uv options that would change what a spec leads to."""
    kept = ("UV_CACHE_DIR", "UV_HTTP", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_KEYRING", "UV_OFFLINE", "UV_CONCURRENT")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UV_") or (name.startswith((*kept, "UV_INDEX_")) and name != "UV_INDEX_URL")
    }
    environment.pop("UV_INDEX_STRATEGY", None)
    environment.pop("VIRTUAL_ENV", None)
    return {**environment, "UV_DEFAULT_INDEX": _default().address, "UV_PYTHON_DOWNLOADS": "never"}


def _explained(stderr: str, spec: EnvSpec, sources: Mapping[str, Index]) -> InputError:
    """uv's refusal in our form; its own explanation is kept, shortened."""
    stderr = re.sub(r"://[^/\s@]+@", "://", stderr)  # an index address may hold a password
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    unreachable = re.search(
        r"(?:Failed to fetch|Failed to download|error sending request for url)\W+(\w+://[^\s`)]+)", stderr
    )
    if unreachable:
        name = _index_of(unreachable[1], sources)
        causes = [line.removeprefix("cause: ") for line in lines if line.startswith("cause: ")]
        hint = f"check the network, or set `{indexes.variable(name)}` to a mirror of it"
        return InputError(
            f"`{spec.env}` cannot be locked: the index `{name}` cannot be reached", details=causes[-1:], hint=hint
        )
    told = [line for line in lines if not line.startswith(("Using CPython", "warning:", "Ignoring"))]
    plain = [line.removeprefix("error: ").removeprefix("cause: ") for line in told]
    words = [line.replace(_PROJECT, "the spec").replace("your project", "the spec") for line in plain]
    if "No solution found" in stderr:
        hint = "change the pins in the spec so that they can be had together"
        if "building from source is disabled" in stderr:
            hint = "choose a version that has a wheel, or allow `sdist: true` for the package in the spec"
            words = [line for line in words if not line.startswith("hint:")]
        return InputError(
            f"`{spec.env}` cannot be locked: its packages do not go together", details=_short(words[1:]), hint=hint
        )
    return InputError(f"`{spec.env}` cannot be locked: uv refused", details=_short(words))


def _short(lines: Sequence[str], limit: int = 24) -> list[str]:
    return [*lines[:limit], f"... {len(lines) - limit} more lines"] if len(lines) > limit else list(lines)


def _index_of(address: str, sources: Mapping[str, Index]) -> str:
    for index in sources.values():
        if address.startswith(re.sub(r"://[^/@]+@", "://", index.address).rstrip("/")):
            return index.name
    return DEFAULT_INDEX


def _packages(
    spec: EnvSpec, answer: Mapping[str, Any], exported: Mapping[str, Any], sources: Mapping[str, Index]
) -> list[LockedPackage]:
    markers = {(entry["name"], entry.get("version")): entry.get("marker") for entry in exported["packages"]}
    built = {package.canonical_name for package in spec.packages if package.sdist}
    packages, faults = [], []
    for entry in answer["package"]:
        if entry["name"] == _PROJECT or (entry["name"], entry.get("version")) not in markers:
            continue
        marker = markers[entry["name"], entry.get("version")]
        pythons = [python for python in spec.pythons if not marker or marker_holds(marker, python, spec.platform)]
        if not pythons:
            continue
        try:
            artefacts = _artefacts(entry, pythons, spec.platform, sdist=entry["name"] in built)
        except LockError as error:
            faults.append(error.message)
            continue
        packages.append(
            LockedPackage(
                name=entry["name"],
                version=entry["version"],
                index=sources[entry["name"]].name if entry["name"] in sources else DEFAULT_INDEX,
                pythons=() if len(pythons) == len(spec.pythons) else tuple(pythons),
                requires=_required(entry),
                files=artefacts,
            )
        )
    if faults:
        hint = "choose versions that have wheels, or allow `sdist: true` for the package in the spec"
        raise LockError(
            f"`{spec.env}` cannot be locked: {len(faults)} packages lack what a lock needs", details=faults, hint=hint
        )
    return sorted(packages, key=lambda package: (package.name, package.version))


def _required(entry: Mapping[str, Any]) -> tuple[str, ...]:
    extras = entry.get("optional-dependencies", {}).values()
    edges = [*entry.get("dependencies", ()), *(edge for extra in extras for edge in extra)]
    return tuple(sorted({edge["name"] for edge in edges}))


def _artefacts(
    entry: Mapping[str, Any], pythons: Sequence[str], platform: Platform, *, sdist: bool
) -> tuple[Artefact, ...]:
    """The file each Python version gets, once each."""
    chosen: dict[str, list[str]] = {}
    sources: dict[str, Mapping[str, Any]] = {}
    for python in pythons:
        wheel = _best_wheel(entry.get("wheels", ()), python, platform)
        source = wheel if wheel is not None else entry.get("sdist") if sdist else None
        if source is None:
            where = f"Python {python} on {platform.os} {platform.arch} with glibc {platform.glibc}"
            raise LockError(f"`{entry['name']}` {entry['version']} has no wheel for {where}")
        chosen.setdefault(_file_name(source), []).append(python)
        sources[_file_name(source)] = source
    return tuple(
        _artefact(entry, name, sources[name], () if len(served) == len(pythons) else tuple(served))
        for name, served in chosen.items()
    )


def _artefact(entry: Mapping[str, Any], name: str, source: Mapping[str, Any], pythons: tuple[str, ...]) -> Artefact:
    label = f"`{entry['name']}` {entry['version']}: `{name}`"
    sha256, size = str(source.get("hash", "")).removeprefix("sha256:"), source.get("size")
    path = indexes.local_path(str(source.get("path") or source.get("url", "")))
    if path is not None and path.is_file():
        sha256, size = files.sha256_file(path), path.stat().st_size
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise LockError(f"{label} has no sha256 at its index")
    size = size or _asked_size(str(source.get("url", "")))
    if not size:
        raise LockError(f"{label} has no size at its index")
    return Artefact(file=name, sha256=sha256, size=int(size), pythons=pythons)


def _asked_size(url: str) -> int | None:
    """The size an index leaves out, from the file's own host."""
    import requests  # noqa: PLC0415  (reading a lock, which every verb does, must not cost an HTTP client)

    try:
        answer = requests.head(url, timeout=30, allow_redirects=True, headers={"Accept-Encoding": "identity"})
    except requests.RequestException:
        return None
    return int(answer.headers.get("Content-Length", 0)) if answer.ok else None


def _file_name(source: Mapping[str, Any]) -> str:
    return unquote(urlsplit(str(source.get("url") or source.get("path"))).path).rsplit("/", 1)[-1]


def _best_wheel(wheels: Sequence[Mapping[str, Any]], python: str, platform: Platform) -> Mapping[str, Any] | None:
    """The wheel an installer would take: the most specific tag, then the highest build number."""
    ranks = {tag: rank for rank, tag in enumerate(wheel_tags(python, platform))}
    best: tuple[int, Any, Mapping[str, Any]] | None = None
    for wheel in wheels:
        try:
            _, _, build, tags = parse_wheel_filename(_file_name(wheel))
        except InvalidWheelFilename:
            continue
        fitting = [ranks[tag] for tag in tags if tag in ranks]
        if fitting and (best is None or (-min(fitting), build) > (-best[0], best[1])):
            best = (min(fitting), build, wheel)
    return best[2] if best else None


def wheel_tags(python: str, platform: Platform) -> Iterator[Tag]:
    """The tags a CPython of a platform takes, the most specific first (PEP 425, PEP 600)."""
    version = (3, int(python.split(".")[1]))
    aliases = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    names = []
    for minor in range(int(platform.glibc.split(".")[1]), 4, -1):
        names.append(f"manylinux_2_{minor}_{platform.arch}")
        if minor in aliases:
            names.append(f"{aliases[minor]}_{platform.arch}")
    names.append(f"linux_{platform.arch}")
    abi = f"cp3{version[1]}"
    yield from cpython_tags(version, abis=[abi], platforms=names)
    yield from compatible_tags(version, interpreter=abi, platforms=names)
