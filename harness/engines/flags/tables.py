"""Where a release's flag table comes from: its wheel, a cache of what was read before, or the tables shipped here."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from harness import files
from harness.engines.flags import own, read_sglang, read_vllm
from harness.engines.flags.source import Sources
from harness.engines.flags.table import FORMAT, Flag, FlagTable, collect
from harness.errors import InputError

SHIPPED = Path(__file__).parent / "shipped"

_READERS: dict[str, Callable[[Sources], Iterator[Flag]]] = {"sglang": read_sglang.flags, "vllm": read_vllm.flags}
ENGINES = tuple(_READERS)

# Environment variables of an engine: how their names look, and where in the wheel they are spelt out.
VARIABLES = {
    "sglang": (re.compile(r"\b(?:SGLANG|SGL)_[A-Z0-9_]*[A-Z0-9]\b"), "sglang/"),
    "vllm": (re.compile(r"\bVLLM_[A-Z0-9_]*[A-Z0-9]\b"), "vllm/envs.py"),
}


def table(engine: str, version: str, wheel: Path | None = None, *, cache: Path | None = None) -> FlagTable | None:
    """What one release of an engine accepts on its command line.

    Args:
        engine: its name; `simulated` and `llamacpp` (the launcher) are programs of ours and come with their tables.
        version: its version, as locked.
        wheel: the locked wheel, when it has been fetched; nothing in it is run or imported.
        cache: a folder to keep what was read in, named by the wheel's sha256.

    Returns:
        The table, or None when there is neither a wheel nor a shipped table of this version: the flags are unchecked.

    Raises:
        InputError: the wheel is unreadable, is of another version, or holds no server arguments.
    """
    if engine not in _READERS:
        return own.table(engine)
    if wheel is None:
        shipped = SHIPPED / f"{engine}-{_public(version)}.json"
        return FlagTable.from_json(files.read_json(shipped)) if shipped.is_file() else None
    sha256 = files.sha256_file(wheel)
    cached = cache / f"{engine}-{sha256[:16]}.json" if cache else None
    if cached and cached.is_file() and (data := files.read_json(cached)).get("format") == FORMAT:
        return FlagTable.from_json(data)
    found = read(engine, version, wheel.name, Sources.of_wheel(wheel), sha256)
    if cached:
        files.write_json(cached, found.to_json())
    return found


def read(engine: str, version: str, wheel_name: str, sources: Sources, sha256: str | None) -> FlagTable:
    """A table from the sources of a wheel.

    Raises:
        InputError: the wheel's name gives another version, or it holds no server arguments.
    """
    if (named := _version(wheel_name)) is not None and named != _public(version):
        raise InputError(f"`{wheel_name}` is not {engine} {version}", hint="`harness fetch` gets the locked wheel")
    found = collect(_READERS[engine](sources))
    variables = sources.mentions(*VARIABLES[engine])
    return FlagTable(engine, _public(version), wheel_name, sha256, found, variables)


def shipped_versions(engine: str) -> dict[str, FlagTable]:
    """The tables shipped for one engine, by version."""
    found = [FlagTable.from_json(files.read_json(path)) for path in sorted(SHIPPED.glob(f"{engine}-*.json"))]
    return {entry.version: entry for entry in found}


def _version(wheel_name: str) -> str | None:
    try:
        return _public(str(parse_wheel_filename(wheel_name)[1]))
    except InvalidWheelFilename:
        return None


def _public(version: str) -> str:
    """A version without its local part: `0.32.0+cpu` takes the flags of `0.32.0`."""
    return re.sub(r"\+.*", "", version)
