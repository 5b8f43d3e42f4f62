"""What a lock is: one spec resolved to the last byte, with one identity. Values and their text; no files, no network.

Everything an environment will hold is named here by version, file name, sha256 and size; nothing says which host it
came from. `env_id` is the sha256 over what is wanted plus what was found (see `Lock.computed_id`).
"""

from collections.abc import Iterator, Sequence

from pydantic import Field

from harness import files
from harness.env import toml
from harness.env.spec import DEFAULT_INDEX, Wanted
from harness.strict import Strict

VERSION = 1
_SHA256 = r"^[0-9a-f]{64}$"


class Artefact(Strict):
    """One file of a package; `size` in bytes, `pythons` when it serves only some of the package's Python versions."""

    file: str
    sha256: str = Field(pattern=_SHA256)
    size: int = Field(gt=0)
    pythons: tuple[str, ...] = ()


class LockedPackage(Strict):
    """One package: `pythons` when only some of the lock's Python versions get it, `requires` names what it needs."""

    name: str
    version: str
    index: str = DEFAULT_INDEX
    pythons: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    files: tuple[Artefact, ...] = Field(min_length=1)

    def artefact(self, python: str) -> Artefact | None:
        """The file installed for a Python version; none when that version does not get the package."""
        if self.pythons and python not in self.pythons:
            return None
        return next((file for file in self.files if not file.pythons or python in file.pythons), None)


class LockedOverlay(Strict):
    """A source folder of ours that is laid over the environment."""

    overlay: str
    name: str
    version: str
    sha256: str = Field(pattern=_SHA256)


class PatchTarget(Strict):
    """One patched file, relative to site-packages, with its bytes before and after."""

    path: str
    before: str = Field(pattern=_SHA256)
    after: str = Field(pattern=_SHA256)


class LockedPatch(Strict):
    """A patch, by the digest of its file and of what it changes."""

    name: str
    sha256: str = Field(pattern=_SHA256)
    targets: tuple[PatchTarget, ...]


class Lock(Strict):
    """A spec, resolved."""

    version: int = Field(default=VERSION, ge=VERSION, le=VERSION)
    env_id: str = Field(pattern=_SHA256)
    spec_digest: str = Field(pattern=_SHA256)
    wanted: Wanted
    packages: tuple[LockedPackage, ...]
    overlays: tuple[LockedOverlay, ...] = ()
    patches: tuple[LockedPatch, ...] = ()

    @property
    def name(self) -> str:
        """The spec's name."""
        return self.wanted.env

    @property
    def pythons(self) -> tuple[str, ...]:
        """The Python versions it covers, as `3.12`."""
        return self.wanted.pythons

    def selected(self, python: str) -> Iterator[tuple[LockedPackage, Artefact]]:
        """The packages and files one Python version gets."""
        for package in self.packages:
            if artefact := package.artefact(python):
                yield package, artefact

    def computed_id(self) -> str:
        """The identity: what is wanted, and name, version and file hashes of all that will be installed."""
        return files.digest(
            {
                "lock": self.version,
                "wanted": self.wanted.canonical(),
                "packages": [
                    [package.name, package.version, [[file.file, file.sha256] for file in package.files]]
                    for package in self.packages
                ],
                "overlays": [overlay.model_dump(mode="json") for overlay in self.overlays],
                "patches": [patch.model_dump(mode="json") for patch in self.patches],
            }
        )


def assemble(
    wanted: Wanted,
    packages: Sequence[LockedPackage],
    overlays: Sequence[LockedOverlay] = (),
    patches: Sequence[LockedPatch] = (),
) -> Lock:
    """A lock of its parts, with its identity worked out."""
    lock = Lock(
        env_id="0" * 64,
        spec_digest=wanted.digest,
        wanted=wanted,
        packages=tuple(packages),
        overlays=tuple(overlays),
        patches=tuple(patches),
    )
    return lock.model_copy(update={"env_id": lock.computed_id()})


def render(lock: Lock) -> str:
    """A lock as text."""
    lines = [
        f"# Made by `harness lock {lock.name}` from `{lock.name}.yaml`; not for editing.",
        f"version = {lock.version}",
        f"env_id = {toml.value(lock.env_id)}",
        f"spec_digest = {toml.value(lock.spec_digest)}",
        "",
        "[wanted]",
        *toml.pairs(lock.wanted.canonical()),
    ]
    for title, rows in (("packages", lock.packages), ("overlays", lock.overlays), ("patches", lock.patches)):
        for row in rows:
            lines += ["", f"[[{title}]]", *toml.pairs(row.model_dump(mode="json", exclude_defaults=True))]
    return "\n".join(lines) + "\n"
