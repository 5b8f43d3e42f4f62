"""Flag tables of the programs that are ours: the simulated server, and the launcher of llama.cpp."""

import argparse
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness import __version__
from harness.engines import llamacpp_server
from harness.engines.flags.table import Flag, FlagTable, Kind, Takes, collect
from harness.engines.simulation import arguments

PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "simulated": lambda: arguments.parser(""),
    "llamacpp": llamacpp_server.parser,
}
# llama.cpp takes these as one value with commas; a recipe may write a list.
_JOINED = ("spec-type", "spec-synth-rates", "alias")


def table(engine: str) -> FlagTable | None:
    """What a program of ours accepts on its command line; None for an engine that is not ours.

    For llama.cpp these are the launcher's flags: a recipe with `binary:` runs another program, whose flags are its own.
    """
    if engine not in PARSERS:
        return None
    return FlagTable(engine, __version__, "argparse", None, collect(_flags(PARSERS[engine]())))


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    # argparse has no public list of its options.
    for action in parser._actions:
        long = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
        if not long or long == ["help"]:
            continue
        choices = tuple(str(choice) for choice in action.choices) if action.choices else None
        yield Flag(long[0], _takes(action, long[0]), _kind(action.type), choices, tuple(long[1:]), action.required)


def _takes(action: argparse.Action, name: str) -> Takes:
    if action.nargs == 0:
        return "nothing"
    return "many" if isinstance(action.default, list) or name in _JOINED else "one"


def _kind(reader: Any) -> Kind:
    """What a value must parse as: `int`, `float`, or what a reader of ours says it returns."""
    returned = reader if isinstance(reader, type) else typing.get_type_hints(reader).get("return") if reader else str
    kinds: dict[Any, Kind] = {int: "int", float: "float", str: "str"}
    return kinds.get(returned, "other")
