"""The reference pages that the code itself writes: commands, exit codes, recipe, spec.

    python scripts/reference_pages.py           writes them into docs/reference/

A test compares them with what is there, so that they cannot say anything else than the code.
"""

import argparse
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from harness import errors
from harness.cli import BUG
from harness.cli import parser as every_verb
from harness.env.spec import EnvSpec
from harness.recipe.references import Reference
from harness.recipe.schema import Recipe

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- made by scripts/reference_pages.py from the code; do not edit -->\n\n"
COMMON = ("json", "quiet", "verbose", "help")


def pages() -> dict[str, str]:
    """File name -> content of every generated page."""
    return {
        "cli.md": MADE + "\n".join(_commands()),
        "exit-codes.md": MADE + "\n".join(_exit_codes()),
        "recipe.md": MADE + "\n".join(_models("A recipe, key by key", _RECIPE, Recipe)),
        "spec.md": MADE + "\n".join(_models("A spec, key by key", _SPEC, EnvSpec)),
        "reference-file.md": MADE + "\n".join(_models("A reference, key by key", _REFERENCE, Reference)),
    }


_RECIPE = (
    "What `harness plan` and `harness run` read. An unknown key is an error with its line. [Recipes](../recipes.md) "
    "tells how the sections work together. Any file may begin with `extends: OTHER`."
)
_SPEC = (
    "What `harness lock` reads, `envspecs/NAME.yaml`. An unknown key is an error with its line. "
    "[Specs, locks, builds](../specs-and-locks.md) tells how a spec becomes a lock. Any file may begin with "
    "`extends: OTHER`."
)
_REFERENCE = (
    "Numbers of others, as `harness compare` reads them and `harness import` writes them, such as those in "
    "`recipes/references/`. Latencies stand under the names of [our own formulas](../metrics.md)."
)


# Commands


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Each verb also takes `--json` (the answer as JSON), `-q` (errors only), `-v` (more talk) and `-h`. stdout is"
    yield "data, stderr is talk. [Exit codes](exit-codes.md) are the same everywhere.\n"
    for name, parser, summary in _verbs(every_verb()):
        yield from _command(f"harness {name}", parser, summary)


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Name, parser and one-line help of each verb, in the parser's order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            yield from ((name, child, helps.get(name, "")) for name, child in action.choices.items())


def _command(name: str, parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    shown = [action for action in parser._actions if action.dest not in COMMON and action.help != argparse.SUPPRESS]
    plain = [action for action in shown if not isinstance(action, argparse._SubParsersAction)]
    yield f"## {name}\n" if name.count(" ") == 1 else f"### {name}\n"
    yield f"{summary[:1].upper()}{summary[1:]}.\n"
    yield f"```text\n{' '.join([name, *map(_usage, plain)])}\n```\n"
    if parser.description and parser.description.rstrip(".") != summary:
        yield f"{' '.join(parser.description.split())}\n"
    if any(action.help for action in plain):
        yield "| argument | what it does |\n| --- | --- |"
        yield from (f"| `{_spelt(action)}` | {_cell(_told(action))} |" for action in plain)
        yield ""
    for child, below, about in _verbs(parser):
        yield from _command(f"{name} {child}", below, about)


def _usage(action: argparse.Action) -> str:
    value = _value(action)
    if action.option_strings:
        text = f"{action.option_strings[-1]} {value}".strip()
        return text if action.required else f"[{text}]"
    return {"*": f"[{value} ...]", "+": f"{value} [...]", "?": f"[{value}]"}.get(str(action.nargs), value)


def _spelt(action: argparse.Action) -> str:
    return f"{', '.join(action.option_strings)} {_value(action)}".strip() if action.option_strings else _value(action)


def _value(action: argparse.Action) -> str:
    """What stands for the action's value; nothing where it takes none."""
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    named = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    text = " ".join(named) if isinstance(named, tuple) else named
    return f"[{text}]" if action.option_strings and action.nargs == "?" else text


def _told(action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": "harness"}
    return f"{text[:1].upper()}{text[1:]}" if text else ""


# Exit codes


def _exit_codes() -> Iterator[str]:
    yield "# Exit codes\n"
    yield "The same for every verb. An error on stderr says what, where, what was seen; after a blank line, a hint.\n"
    yield "| code | what it means | in the code |\n| ---: | --- | --- |"
    yield "| 0 | done | |"
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HarnessError)]
    rows = {
        kind.exit_code: f"{_cell(_sentence(kind))} | `{kind.__name__}`" for kind in set(kinds) - {errors.HarnessError}
    }
    rows[BUG] = "A bug in the harness; stderr has the traceback. | any other exception"
    for code, row in sorted(rows.items()):
        yield f"| {code} | {row} |"
    yield ""


# Files people write


def _models(title: str, about: str, root: type[BaseModel]) -> Iterator[str]:
    yield f"# {title}\n"
    yield f"{about}\n"
    for model in _reachable(root):
        yield f"## {model.__name__}\n" if model is not root else "## At the top\n"
        yield f"{_sentence(model)}\n" if model is not root else ""
        described = _attributes(model)
        yield "| key | what it may be | default | what it says |\n| --- | --- | --- | --- |"
        for name, field in model.model_fields.items():
            text = field.description or described.get(name, "")
            yield f"| `{name}` | {_cell(_kind(field.annotation))} | {_default(field)} | {_cell(text)} |"
        yield ""


def _reachable(root: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and those in its fields, in the order in which they are met."""
    found: list[type[BaseModel]] = []
    waiting = [root]
    while waiting:
        model = waiting.pop(0)
        if model not in found:
            found.append(model)
            waiting += [part for field in model.model_fields.values() for part in _parts(field.annotation)]
    return found


def _parts(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _kind(kind: Any) -> str:
    """A type as people say it."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not type(None)]
    if origin is None:
        return _plain(kind)
    told = {
        typing.Annotated: lambda: _kind(parts[0]),
        typing.Union: lambda: ", or ".join(dict.fromkeys(map(_kind, parts))),
        Literal: lambda: ", ".join(f"`{part}`" for part in parts),
        list: lambda: f"list of: {_kind(parts[0])}",
        dict: lambda: f"mapping to: {_kind(parts[1])}",
    }
    return told[{tuple: list, types.UnionType: typing.Union}.get(origin, origin)]()


def _plain(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}.get(kind, "anything")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None or value in ((), [], {}, ""):
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """What a docstring's `Attributes:` says of each."""
    section = (inspect.getdoc(model) or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        head, colon, text = line.strip().partition(": ")
        if line.startswith("    ") and not line.startswith("     ") and colon:
            name = head
            found[name] = text
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _sentence(thing: Any) -> str:
    """The first paragraph of a docstring, in a line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, content in pages().items():
        (FOLDER / file_name).write_text(content)
