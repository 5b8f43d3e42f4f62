"""What software an environment shall hold: the file people write, read strictly.

`Wanted` is the part that decides what gets installed, and so is copied into the lock and into its `env_id`; `EnvSpec`
adds what may change without changing the software (a description, the addresses of the indexes).
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import Field, PrivateAttr, field_validator, model_validator

from harness import files, strict
from harness.errors import Fault, InputError
from harness.strict import Document, Strict, suggest

DEFAULT_INDEX = "default"
_MINORS = tuple(f"3.{minor}" for minor in range(9, 20))
_IMAGE = re.compile(r"[a-z0-9][\w./-]*:[\w.-]+(@sha256:[0-9a-f]{64})?")
Check = Literal["imports", "one-owner", "record", "cuda-major", "abi", "arch", "versions"]


class Platform(Strict):
    """The machine the environment is for; `glibc` is the oldest it may have."""

    os: Literal["linux"] = Field(default="linux", description="the only one there is")
    arch: Literal["x86_64", "aarch64"] = Field(default="x86_64", description="of the machine")
    glibc: str = Field(default="2.28", pattern=r"^2\.\d+$", description="the oldest that the machine may have")


class Cuda(Strict):
    """The CUDA side: toolkit release, architectures that must be covered, the oldest driver."""

    toolkit: str = Field(pattern=r"^\d+\.\d+(\.\d+)?$", description="release of the CUDA toolkit, such as 13.0.1")
    arch: tuple[str, ...] = Field(min_length=1, description="architectures that kernels must cover, such as sm_120a")
    driver: str = Field(description="NVIDIA drivers that will do, such as >=580")

    @field_validator("arch")
    @classmethod
    def _arch_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"sm_\d{2,3}[af]?", name):
                raise ValueError(f"`{name}` is not an architecture; write it like `sm_120a`")
        return value

    @field_validator("driver")
    @classmethod
    def _driver_range(cls, value: str) -> str:
        return _specifier(value)


class Package(Strict):
    """One package asked for.

    Attributes:
        version: an exact version, or a range such as `>=2,<3`; all versions when absent.
        index: the index it comes from, by name; the default index when absent.
        dependencies: replaces what the package itself asks for (an empty list: install it alone).
        sdist: allows a source distribution, for a package that has no wheel.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", description="as the index spells it")
    version: str | None = Field(default=None, description="exact, or a range such as >=2,<3; any when left out")
    extras: tuple[str, ...] = Field(default=(), description="optional dependencies to install as well")
    index: str | None = Field(default=None, description="the index it comes from, by its name in `indexes`")
    dependencies: tuple[str, ...] | None = Field(
        default=None, description="in place of what the package itself asks for; []: install it alone"
    )
    sdist: bool = Field(default=False, description="allow a source distribution, where there is no wheel")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, dict):
            # Past this validator pydantic takes the data for Python's, where strictness tells lists from tuples.
            return {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()}
        if not isinstance(value, str):
            raise ValueError("write `name==version`, or a mapping with `name` and what else it needs")
        asked = _requirement(value)
        if asked.marker or asked.url:
            raise ValueError(
                f"`{value}`: markers and addresses have no place here; the platform and the indexes say it"
            )
        version = str(asked.specifier)
        exact = re.fullmatch(r"==([^=*,]+)", version)
        fields = {
            "name": asked.name,
            "version": exact[1] if exact else version or None,
            "extras": tuple(sorted(asked.extras)),
        }
        return {key: part for key, part in fields.items() if part}

    @field_validator("version")
    @classmethod
    def _version_reads(cls, value: str | None) -> str | None:
        if value is not None:
            _specifier(value if value[:1] in "<>=!~" else f"=={value}")
        return value

    @field_validator("dependencies")
    @classmethod
    def _dependencies_read(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(str(_requirement(item)) for item in value)

    @property
    def canonical_name(self) -> str:
        """The name as indexes spell it."""
        return canonicalize_name(self.name)

    @property
    def requirement(self) -> str:
        """As a PEP 508 requirement."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        version = self.version or ""
        return f"{self.name}{extras}{version if version[:1] in ('', *'<>=!~') else '==' + version}"

    def __str__(self) -> str:
        words = [self.requirement]
        words += [f"from {self.index}"] if self.index else []
        if self.dependencies is not None:
            words += [f"with dependencies {', '.join(self.dependencies)}" if self.dependencies else "alone"]
        words += ["sdist allowed"] if self.sdist else []
        return " ".join(words)


class Wanted(Strict):
    """Everything in a spec that decides what gets installed; part of the `env_id`."""

    env: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="the environment's name, and the file's")
    python: str = Field(description='a minor version such as "3.12", or a range such as ">=3.11,<3.14"')
    platform: Platform = Field(default=Platform(), description="the machine it is for")
    cuda: Cuda | None = Field(default=None, description="the CUDA side; none for a CPU environment")
    base_image: str | None = Field(default=None, description="what an image of it is built on: name:tag[@sha256:...]")
    packages: tuple[Package, ...] = Field(description="what is asked for: `name==version`, or a mapping")
    constraints: tuple[str, ...] = Field(default=(), description="limits on versions of packages that others bring")
    overrides: tuple[str, ...] = Field(default=(), description="requirements that win over what packages ask for")
    exclude: tuple[str, ...] = Field(default=(), description="packages that are not installed, whoever asks for them")
    overlays: tuple[str, ...] = Field(default=(), description="stand-ins laid into site-packages: overlays/NAME")
    patches: tuple[str, ...] = Field(
        default=(), description="changes bound to the bytes they were made for: patches/NAME"
    )
    variables: dict[str, str] = Field(default_factory=dict, description="environment variables of every server in it")
    checks: tuple[Check, ...] = Field(default=(), description="what `harness validate` checks")

    @field_validator("python")
    @classmethod
    def _python_range(cls, value: str) -> str:
        if not _pythons(value):
            raise ValueError(f'"{value}" allows no Python we know; write "3.12" or ">=3.11,<3.14"')
        return value

    @field_validator("base_image")
    @classmethod
    def _image_reference(cls, value: str | None) -> str | None:
        if value is not None and not _IMAGE.fullmatch(value):
            raise ValueError("write it as `name:tag` or `name:tag@sha256:DIGEST`")
        return value

    @field_validator("constraints", "overrides")
    @classmethod
    def _requirements_read(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(_requirement(item)) for item in value)

    @field_validator("variables")
    @classmethod
    def _variable_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"`{name}` cannot be the name of an environment variable")
        return value

    @model_validator(mode="after")
    def _packages_once(self) -> Self:
        if not self.packages:
            raise ValueError("`packages` is empty")
        names = [package.canonical_name for package in self.packages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"packages named twice: {', '.join(f'`{name}`' for name in twice)}")
        return self

    @property
    def pythons(self) -> tuple[str, ...]:
        """The Python versions it is for, as `3.12`."""
        return _pythons(self.python)

    @cached_property
    def digest(self) -> str:
        """Hex sha256 over what is wanted: equal specs give equal digests, whatever their comments and order of keys."""
        return files.digest(self.canonical())

    def canonical(self) -> dict[str, Any]:
        """What is wanted as plain data. Options left at their defaults are left out, so that a spec keeps its digest
        when a later harness knows more options; the platform is always spelt out."""
        plain = self.wanted().model_dump(mode="json", exclude_defaults=True)
        return plain | {"platform": self.platform.model_dump(mode="json")}

    def wanted(self) -> "Wanted":
        """This, without what does not decide what gets installed."""
        return Wanted.model_validate({name: getattr(self, name) for name in Wanted.model_fields})


class EnvSpec(Wanted):
    """A spec file: what is wanted, and where it may be had.

    Attributes:
        indexes: public address (or a folder of wheels, relative to the spec) of every index but the default one.
        not_imported: packages whose code nobody uses (they hold data), which no check need import, with the reason.
    """

    description: str = Field(default="", description="what it is for")
    indexes: dict[str, str] = Field(
        default_factory=dict, description="name -> public address, or a folder of wheels beside the spec"
    )
    not_imported: dict[str, str] = Field(
        default_factory=dict, description="package of the list above that no check need import -> why"
    )
    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def unimported(self) -> dict[str, str]:
        """`not_imported` by canonical names."""
        return {canonicalize_name(name): why for name, why in self.not_imported.items()}

    @property
    def folder(self) -> Path:
        """Where the spec lies: its patches and overlays are there too, and relative addresses start there."""
        return self._folder

    @field_validator("indexes")
    @classmethod
    def _index_addresses(cls, value: dict[str, str]) -> dict[str, str]:
        for name, address in value.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or name == DEFAULT_INDEX:
                raise ValueError(
                    f"`{name}` cannot be an index name: lower case, digits and `-`, and not `{DEFAULT_INDEX}`"
                )
            if urlsplit(address).username:
                raise ValueError(
                    f"the address of `{name}` holds a user name; credentials belong to the machine, not here"
                )
        return value


def load(path: Path) -> EnvSpec:
    """Read a spec, with what it extends laid under it.

    Raises:
        InputError: every fault at once, each with the line it was written on.
    """
    document = _extended(path, ())
    spec = strict.parse(document, EnvSpec)
    faults = [*_name_fault(spec, path, document), *_index_faults(spec, document), *_unimported_faults(spec, document)]
    if faults:
        raise InputError.of(faults)
    spec._folder = path.parent.resolve()
    return spec


def _extended(path: Path, above: tuple[Path, ...]) -> Document:
    document = strict.read(path)
    base = document.data.pop("extends", None)
    if base is None:
        return document
    chain = (*above, path.resolve())
    if not isinstance(base, str):
        raise InputError.of([document.fault(("extends",), f"`extends` must be the name of a spec, got `{base}`")])
    parent = _parent(path, base)
    if parent.resolve() in chain:
        circle = " -> ".join(link.stem for link in (*chain[chain.index(parent.resolve()) :], parent))
        raise InputError.of([document.fault(("extends",), f"specs extend each other in a circle: {circle}")])
    if not parent.is_file():
        known = [other.stem for other in path.parent.glob("*.yaml") if other != path]
        message = f"`extends`: there is no spec `{base}` in `{path.parent}`"
        raise InputError.of([document.fault(("extends",), message, suggest(base, known))])
    return strict.merge(_extended(parent, chain), document)


def lineage(path: Path) -> list[Path]:
    """The files a spec is made of: itself, what that extends, and so on. For a spec that `load` took."""
    base = strict.read(path).data.get("extends")
    return [path, *(lineage(_parent(path, str(base))) if base else ())]


def _parent(path: Path, base: str) -> Path:
    return path.parent / (base if base.endswith(".yaml") else f"{base}.yaml")


def _name_fault(spec: EnvSpec, path: Path, document: Document) -> list[Fault]:
    if spec.env == path.stem:
        return []
    return [
        document.fault(("env",), f"`env` is `{spec.env}`, the file is `{path.name}`", "the two must be the same name")
    ]


def _index_faults(spec: EnvSpec, document: Document) -> list[Fault]:
    known = {*spec.indexes, DEFAULT_INDEX}
    return [
        document.fault(
            ("packages", position, "index"),
            f"`packages[{position}].index`: no index `{package.index}` is named in `indexes`",
            suggest(package.index, known),
        )
        for position, package in enumerate(spec.packages)
        if package.index is not None and package.index not in known
    ]


def _unimported_faults(spec: EnvSpec, document: Document) -> list[Fault]:
    known = {package.canonical_name: package.name for package in spec.packages}
    return [
        document.fault(
            ("not_imported", name),
            f"`not_imported`: `{name}` is not in `packages`",
            suggest(name, known.values()),
        )
        for name in spec.not_imported
        if canonicalize_name(name) not in known
    ]


def _requirement(text: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`{text}` is not a requirement: {reason}") from error


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"`{text}` is not a version or a range of versions") from error
    return text


def _pythons(text: str) -> tuple[str, ...]:
    if text in _MINORS:
        return (text,)
    try:
        allowed = SpecifierSet(text)
    except InvalidSpecifier:
        return ()
    return tuple(minor for minor in _MINORS if allowed.contains(f"{minor}.99") or allowed.contains(f"{minor}.0"))


def marker_holds(marker: str, python: str, platform: Platform) -> bool:
    """Whether a PEP 508 marker holds for any patch release of a Python minor version on a platform."""
    environment = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": platform.arch,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_version": python,
        "sys_platform": platform.os,
    }
    return any(
        Marker(marker).evaluate({**environment, "python_full_version": full, "implementation_version": full})
        for full in (f"{python}.0", f"{python}.99")
    )
