"""Overlays: small source folders of ours laid over an environment, as distributions that say they are ours.

A folder `envspecs/overlays/NAME/` holds `overlay.yaml` (which distribution it stands for, and why) and the files to lay
into site-packages. It may hold no files at all: then only the distribution's name and version are provided.
"""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import Field

from harness import files, strict
from harness.errors import BuildError, InputError
from harness.strict import Strict, suggest

_HEAD = "overlay.yaml"


class _Head(Strict):
    distribution: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    version: str
    why: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Overlay:
    """One overlay: the distribution it stands for, and its files by their path under site-packages."""

    folder: Path
    name: str
    version: str
    why: str
    paths: tuple[str, ...]
    sha256: str

    @property
    def dist_info(self) -> str:
        """Its metadata folder under site-packages."""
        return f"{canonicalize_name(self.name).replace('-', '_')}-{self.version}.dist-info"


def load(folder: Path) -> Overlay:
    """Read an overlay; `sha256` covers the name, version and bytes of every file, and not the reason.

    Raises:
        InputError: there is none, or its `overlay.yaml` is wrong.
    """
    if not (folder / _HEAD).is_file():
        known = [path.parent.name for path in folder.parent.glob(f"*/{_HEAD}")]
        raise InputError(f"there is no overlay `{folder.name}` in `{folder.parent}`", hint=suggest(folder.name, known))
    head = strict.parse(strict.read(folder / _HEAD), _Head)
    paths = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != _HEAD and "__pycache__" not in path.parts
    )
    contents = {path: files.sha256_file(folder / path) for path in paths}
    sha256 = files.digest({"name": head.distribution, "version": head.version, "files": contents})
    return Overlay(folder, head.distribution, head.version, head.why, tuple(paths), sha256)


def install(overlay: Overlay, site_packages: Path) -> None:
    """Lay an overlay's files into site-packages, with a dist-info that owns them.

    Raises:
        BuildError: a file of it is there already; nothing is written then.
    """
    taken = [path for path in overlay.paths if (site_packages / path).exists()]
    if taken:
        raise BuildError(f"overlay `{overlay.folder.name}` would replace files that a package owns", details=taken[:10])
    meta = f"Metadata-Version: 2.1\nName: {overlay.name}\nVersion: {overlay.version}\nSummary: {overlay.why}\n"
    contents = {path: (overlay.folder / path).read_bytes() for path in overlay.paths}
    contents |= {f"{overlay.dist_info}/METADATA": meta.encode(), f"{overlay.dist_info}/INSTALLER": b"harness\n"}
    record = "".join(f"{path},{_record_hash(data)},{len(data)}\n" for path, data in contents.items())
    contents[f"{overlay.dist_info}/RECORD"] = f"{record}{overlay.dist_info}/RECORD,,\n".encode()
    for path, data in contents.items():
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _record_hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
