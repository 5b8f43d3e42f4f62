"""A recipe's arguments held against a flag table; every fault at once, each at its own line."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from harness import strict
from harness.engines.engine import Scalar
from harness.engines.flags.table import Flag, FlagTable
from harness.engines.flags.tables import VARIABLES, shipped_versions
from harness.errors import Fault, Location
from harness.strict import Strict

Value = Scalar | Sequence[Scalar]
Locate = Callable[[str], Location | None]

_SIZE = re.compile(r"-?\d+(\.\d+)?[kKmMgGtT]?|auto")
_FREE = "under `unchecked:` an option is passed on as it is"


class _Renamed(Strict):
    flag: str
    to: str
    versions: str
    source: str


class _Pair(Strict):
    flags: tuple[str, str]
    versions: str
    why: str
    source: str


class _Known(Strict):
    renamed: tuple[_Renamed, ...] = ()
    conflicts: tuple[_Pair, ...] = ()
    requires: tuple[_Pair, ...] = ()


class _Facts(Strict):
    sglang: _Known
    vllm: _Known


def check(table: FlagTable, args: Mapping[str, Value], locate: Locate) -> list[Fault]:
    """What is wrong with a recipe's arguments for one release.

    Args:
        table: what the release accepts.
        args: options without dashes; True is a bare flag, None and False leave it out, a list gives several values.
        locate: where each option was written.

    Returns:
        Unknown and removed options (with a successor, where one is known), values of the wrong type or outside the
        choices, pairs that exclude each other, options that do nothing without another; empty when all is well.
    """
    faults: list[Fault] = []
    for name, value in args.items():
        flag = _option(table, name)
        faults += [Fault(message, locate(name), hint) for message, hint in _faults(table, flag, name, value)]
    return [*faults, *_pairs(table, args, locate)]


def deprecations(table: FlagTable, args: Mapping[str, Value], locate: Locate) -> list[Fault]:
    """Options that still work but that the release says it will drop: worth saying, not a reason to stop."""
    found = [(name, table.find(name)) for name, value in args.items() if not _left_out(value)]
    return [
        Fault(f"`{name}` is deprecated in {table.engine} {table.version}", locate(name), flag.deprecated)
        for name, flag in found
        if flag is not None and flag.deprecated
    ]


def check_variables(table: FlagTable, variables: Mapping[str, str], locate: Locate) -> list[Fault]:
    """Variables with the engine's prefix that this release never reads: it would start, and ignore them.

    Args:
        table: what the release reads; an empty set of variables means not known, and finds nothing.
        variables: the environment variables a recipe sets.
        locate: where each was written.
    """
    prefix = VARIABLES[table.engine][0] if table.engine in VARIABLES else None
    if prefix is None or not table.variables:
        return []
    faults = []
    for name in variables:
        if prefix.fullmatch(name) and name not in table.variables:
            near = difflib.get_close_matches(name, sorted(table.variables), n=1, cutoff=0.8)
            others = [v for v, other in shipped_versions(table.engine).items() if name in other.variables]
            known = f"; {table.engine} {', '.join(others)} does" if others else ""
            message = f"{table.engine} {table.version} does not read the variable `{name}`{known}"
            hint = "leave it out for this release" if others else f"did you mean `{near[0]}`?" if near else None
            faults.append(Fault(message, locate(name), hint))
    return faults


def _option(table: FlagTable, name: str) -> Flag | None:
    """An option; vLLM's `config.key` sets one key of a JSON option."""
    stem, dot, _ = name.partition(".")
    if dot and table.engine == "vllm":
        found = table.find(stem)
        return Flag(name, kind="other") if found is not None and found.kind in {"json", "other"} else None
    return table.find(name)


def _faults(table: FlagTable, flag: Flag | None, name: str, value: Value) -> Iterator[tuple[str, str | None]]:
    if flag is None:
        yield _unknown(table, name)
    elif flag.removed:
        yield f"`{name}` was removed from {table.engine} {table.version}", flag.removed
    elif value is False and flag.takes == "on or off" and not name.startswith("no-"):
        yield (
            f"`{name}: false` leaves the option out, which keeps its default",
            f"write `no-{flag.name}: true` to turn it off",
        )
    elif not _left_out(value):
        yield from _value_faults(flag, name, value)


def _unknown(table: FlagTable, name: str) -> tuple[str, str | None]:
    release = f"{table.engine} {table.version}"
    for entry in _known(table.engine).renamed:
        if entry.flag == name and table.version in SpecifierSet(entry.versions, prereleases=True):
            return f"`{name}` is not an option of {release} any more", f"write `{entry.to}`"
    others = [version for version, other in shipped_versions(table.engine).items() if other.find(name) is not None]
    if others:
        return f"`{name}` is not an option of {release}; {table.engine} {', '.join(others)} has it", _near(
            table, name
        ) or _FREE
    if len(begun := table.beginning(name)) > 1:
        return f"`{name}` is the beginning of {len(begun)} options of {release}", "write one in full: " + ", ".join(
            f"`{spelling}`" for spelling in begun[:4]
        )
    return f"`{name}` is not an option of {release}", _near(table, name) or _FREE


def _near(table: FlagTable, name: str) -> str | None:
    near = difflib.get_close_matches(name.replace("_", "-").lower(), list(table.spellings()), n=1, cutoff=0.75)
    return f"did you mean `{near[0]}`?" if near else None


def _value_faults(flag: Flag, name: str, value: Value) -> Iterator[tuple[str, str | None]]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if flag.takes in {"nothing", "on or off"}:
        if value is not True:
            yield f"`{name}` takes no value, got `{_shown(value)}`", f"write `{name}: true`"
        return
    if value is True:
        if flag.takes != "maybe one":
            yield f"`{name}` needs a value", _wanted(flag)
        return
    if several and flag.takes != "many":
        yield f"`{name}` takes one value, got {len(value)}", None  # type: ignore[arg-type]
        return
    for item in value if several else [value]:  # type: ignore[union-attr]
        if (wrong := _wrong(flag, item)) is not None:
            yield f"`{name}` must be {wrong}, got `{_shown(item)}`", _choice(flag, item)


def _wrong(flag: Flag, item: Any) -> str | None:
    """What a value should have been, None when it is that."""
    text = str(item)
    if flag.choices is not None:
        # An engine's own parser may fold case and dashes before it compares.
        folded = text.lower().replace("-", "_")
        fits = text in flag.choices or (flag.kind == "other" and folded in flag.choices)
        return None if fits else "one of " + ", ".join(f"`{choice}`" for choice in flag.choices)
    if flag.kind == "int":
        return None if re.fullmatch(r"[+-]?\d+", text) and not isinstance(item, bool) else "a whole number"
    if flag.kind == "float":
        return None if _is_number(text) else "a number"
    if flag.kind == "size":
        return None if _SIZE.fullmatch(text) else "a whole number, or one with a suffix such as `8k`"
    if flag.kind == "json":
        return None if _is_json(text) else "JSON"
    return None


def _choice(flag: Flag, item: Any) -> str | None:
    near = difflib.get_close_matches(str(item).lower(), [choice.lower() for choice in flag.choices or ()], n=1)
    exact = next((choice for choice in flag.choices or () if near and choice.lower() == near[0]), None)
    return f"did you mean `{exact}`?" if exact else None


def _wanted(flag: Flag) -> str | None:
    if flag.choices is not None:
        return "one of " + ", ".join(f"`{choice}`" for choice in flag.choices)
    words = {"int": "a whole number", "float": "a number", "json": "JSON", "size": "a whole number"}
    return words.get(flag.kind)


def _pairs(table: FlagTable, args: Mapping[str, Value], locate: Locate) -> Iterator[Fault]:
    """Pairs the release itself refuses, or of which one is nothing without the other."""
    given = {_canonical(table, name): name for name, value in args.items() if not _left_out(value)}
    known = _known(table.engine)
    for pair in (*known.conflicts, *known.requires):
        if table.version not in SpecifierSet(pair.versions, prereleases=True):
            continue
        first, second = pair.flags
        if pair in known.conflicts and first in given and second in given:
            yield Fault(f"`{given[first]}` and `{given[second]}` exclude each other: {pair.why}", locate(given[second]))
        if pair in known.requires and first in given and second not in given:
            yield Fault(f"`{given[first]}` needs `{second}`: {pair.why}", locate(given[first]))


def _canonical(table: FlagTable, name: str) -> str:
    stem = name.partition(".")[0] if table.engine == "vllm" else name
    flag = table.find(stem)
    return stem if flag is None or stem.startswith("no-") else flag.name


@cache
def _known(engine: str) -> _Known:
    facts = strict.parse(strict.read(Path(__file__).with_name("known.yaml")), _Facts)
    known = getattr(facts, engine, _Known())
    assert isinstance(known, _Known)
    return known


def _left_out(value: Value) -> bool:
    return value is None or value is False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."
