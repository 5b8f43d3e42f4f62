"""Where packages come from on this machine: index names to addresses.

A lock names its indexes and never their hosts, so that it works behind any mirror. On a machine a name is looked up in
this order: `$HARNESS_INDEX_<NAME>`; `[indexes]` of `$XDG_CONFIG_HOME/harness/indexes.toml`; the spec's own address. The
default index is what the machine's uv or pip configuration says. Folders of wheels that pip is told of (`find-links`)
mirror every index: a pinned file that lies there is taken from there.
"""

import configparser
import os
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import uv

from harness.env.spec import DEFAULT_INDEX
from harness.errors import InputError


@dataclass(frozen=True, slots=True)
class Index:
    """One index on this machine: an address of a simple index, or a flat folder of wheels."""

    name: str
    address: str

    @property
    def folder(self) -> Path | None:
        """The folder, when it is one that holds files rather than a page per package."""
        path = local_path(self.address)
        return path if path is not None and not (path / "index.html").is_file() else None


def local_path(address: str) -> Path | None:
    """The path behind a `file:` address or a plain path; none for a host."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(address) if parts.scheme == "" else None


def locate(name: str, spec_indexes: Mapping[str, str], folder: Path) -> Index:
    """The index of a name on this machine.

    Args:
        name: as the spec and the lock call it.
        spec_indexes: the spec's own addresses.
        folder: where the spec lies; relative folders are relative to it.

    Raises:
        InputError: nothing on this machine or in the spec says where the index is.
    """
    if address := _site_address(name):
        return Index(name, address)
    if name == DEFAULT_INDEX:
        return Index(name, default_address())
    address = spec_indexes.get(name, "")
    if not address:
        raise InputError(
            f"nothing says where the index `{name}` is",
            hint=f"name it under `indexes` in the spec, or set `{variable(name)}`",
        )
    path = local_path(address)
    return Index(name, address if path is None else str((folder / path).resolve()))


def variable(name: str) -> str:
    """The environment variable that says where an index is on this machine."""
    return "HARNESS_INDEX_" + name.upper().replace("-", "_")


def default_address() -> str:
    """The default index: what uv, then pip, is told on this machine, else uv's own."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        if address := os.environ.get(name):
            return address
    if address := _pip_option("index-url"):
        return address
    # uv prints the index it would use; asking it keeps the address of the public index out of this project.
    command = [uv.find_uv_bin(), "pip", "compile", "--emit-index-url", "--no-header", "--offline", "--quiet", "-"]
    answer = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    for line in answer.stdout.splitlines():
        if line.startswith("--index-url "):
            return line.split()[1]
    raise InputError(
        "no default package index: uv names none",
        hint="set `UV_DEFAULT_INDEX`",
        details=answer.stderr.splitlines()[-3:],
    )


def wheel_folders() -> list[Path]:
    """The folders of wheels this machine offers (`find-links`), in order."""
    words = [os.environ.get(name, "") for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS")] + [_pip_option("find-links")]
    paths = [local_path(word) for word in " ".join(words).replace(",", " ").split()]
    return list(dict.fromkeys(path for path in paths if path is not None and path.is_dir()))


def _site_address(name: str) -> str | None:
    if address := os.environ.get(variable(name)):
        return address
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "harness" / "indexes.toml"
    if not path.is_file():
        return None
    try:
        table = tomllib.loads(path.read_text()).get("indexes", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"`{path}` is not valid TOML: {error}") from error
    address = table.get(name) if isinstance(table, dict) else None
    if address is not None and not isinstance(address, str):
        raise InputError(f"`{path}`: the address of `{name}` must be text, got `{address}`")
    return address


def _pip_option(option: str) -> str:
    found = ""
    for path in _pip_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip's own file, which pip itself will complain about
        found = parser.get("global", option, fallback=found)
    return found


def _pip_files() -> Iterator[Path]:
    """pip's configuration files, the weakest first."""
    for folder in reversed(os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield Path.home() / ".pip" / "pip.conf"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pip" / "pip.conf"
    if named := os.environ.get("PIP_CONFIG_FILE"):
        yield Path(named)
