"""argparse's `add_argument` calls and type annotations, read from source into `Flag`s."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from harness.engines.flags.source import Scope, Sources, Unresolved
from harness.engines.flags.table import Flag, Kind, Takes

# What a value parser accepts, by the name of its function.
_PARSERS: Mapping[str, Kind] = {
    "str": "str",
    "int": "int",
    "float": "float",
    "loads": "json",
    "json_list_type": "json",
    "nullable_str": "str",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size",
}
_WRAPPERS = {"optional_type", "parse_type"}
_BUILTINS = {"str", "int", "float", "bool", "dict", "list", "tuple", "set"}
_GENERICS = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "Sequence": "list"}


@dataclass(frozen=True, slots=True)
class Hint:
    """One leaf of a type annotation: its name, its literal options or the leaves of its first parameter."""

    name: str
    options: tuple[Any, ...] = ()
    inner: tuple["Hint", ...] = ()
    variadic: bool = True


def keywords(call: ast.Call, sources: Sources, scope: Scope) -> dict[str, Any]:
    """The keyword arguments of an `add_argument` call, in the words of `flag`."""
    return {word.arg: keyword(word.arg, word.value, sources, scope) for word in call.keywords if word.arg}


def keyword(name: str, node: ast.expr, sources: Sources, scope: Scope) -> Any:
    """One keyword argument: its kind, its action, or its value; None where it cannot be known."""
    if name in {"type", "type_parser"}:
        return parser_kind(node)
    if name == "action":
        return node.value if isinstance(node, ast.Constant) else _class_action(node, sources, scope)
    try:
        return sources.value(node, scope)
    except Unresolved:
        return None


def parser_kind(node: ast.expr) -> Kind:
    """What a `type=` callable accepts; `other` for one of the engine's own."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _PARSERS.get(name, "other")
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name in _WRAPPERS:
            return parser_kind(inner)
    return "other"


def _class_action(node: ast.expr, sources: Sources, scope: Scope) -> dict[str, Any]:
    """An action given as a class: its name and the `nargs` its constructor defaults to."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    try:
        found, _ = sources.find(name, scope)
    except Unresolved:
        return {"class": name}
    constructor = next((item for item in getattr(found, "body", []) if getattr(item, "name", "") == "__init__"), None)
    return {"class": name, **(_defaults(constructor) if isinstance(constructor, ast.FunctionDef) else {})}


def _defaults(function: ast.FunctionDef) -> dict[str, Any]:
    names = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    pairs = zip(names, function.args.defaults, strict=True)
    return {name.arg: value.value for name, value in pairs if isinstance(value, ast.Constant)}


def flag(names: list[str], words: Mapping[str, Any]) -> Flag | None:
    """One option from its spellings (with dashes) and the keywords it was registered with; None without a long one."""
    long = [name.removeprefix("--") for name in names if name.startswith("--")]
    if not long:
        return None
    action = words.get("action")
    note = action if isinstance(action, dict) else {}
    retired = str(note.get("class", "")).startswith("Deprecated")
    removed = words.get("error_message") if retired else None
    choices = words.get("choices")
    return Flag(
        name=long[0],
        aliases=tuple(long[1:]),
        takes=_takes(action, words),
        kind=cast(Kind, words.get("type") or "str"),
        choices=None if choices is None else tuple(str(choice) for choice in choices),
        required=bool(words.get("required")),
        deprecated=_deprecation(words, retired=retired and not removed),
        removed=removed,
    )


def _deprecation(words: Mapping[str, Any], *, retired: bool) -> str | None:
    """What the engine says of an option it is about to drop."""
    text = " ".join(str(words.get("help") or "").split())
    if retired and words.get("new_flag"):
        return f"use `{words['new_flag']}`"
    return text if retired or "deprecated" in text.lower()[:60] else None


def _takes(action: Any, words: Mapping[str, Any]) -> Takes:
    if isinstance(action, dict) and action["class"] == "BooleanOptionalAction":
        return "on or off"
    if isinstance(action, str) and action in {"store_true", "store_false", "store_const", "count"}:
        return "nothing"
    default = action.get("nargs") if isinstance(action, dict) else None
    nargs = words.get("nargs", default)
    if nargs == 0:
        return "nothing"
    if nargs == "?":
        return "maybe one"
    return "many" if nargs in {"+", "*"} or isinstance(nargs, int) or action == "append" else "one"


def hints(node: ast.expr, sources: Sources, scope: Scope) -> tuple[Hint, ...]:
    """The leaves of an annotation; unions and aliases are opened, `Annotated` loses its notes."""
    match node:
        case ast.Constant(value=None):
            return (Hint("None"),)
        case ast.Constant(value=str() as quoted):
            return hints(ast.parse(quoted, mode="eval").body, sources, scope)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return hints(left, sources, scope) + hints(right, sources, scope)
        case ast.Subscript(value=ast.Name(id=name), slice=inside):
            return _generic(name, inside, sources, scope)
        case ast.Name(id=name):
            return _plain(name, sources, scope)
    return (Hint("class"),)


def _generic(name: str, inside: ast.expr, sources: Sources, scope: Scope) -> tuple[Hint, ...]:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        return (Hint("literal", options=tuple(sources.options(inside, scope))),)
    if name == "Optional":
        return (*hints(parts[0], sources, scope), Hint("None"))
    if name == "Union":
        return tuple(leaf for part in parts for leaf in hints(part, sources, scope))
    if name in {"Annotated", "SkipValidation", "InitVar", "A"}:
        return hints(parts[0], sources, scope)
    name = _GENERICS.get(name, name)
    if name not in _BUILTINS:
        return (Hint("class"),)
    variadic = name != "tuple" or any(isinstance(part, ast.Constant) and part.value is ... for part in parts)
    return (Hint(name, inner=hints(parts[0], sources, scope), variadic=variadic),)


def _plain(name: str, sources: Sources, scope: Scope) -> tuple[Hint, ...]:
    if name in _BUILTINS:
        return (Hint(name),)
    if name in _GENERICS:
        return (Hint(_GENERICS[name]),)
    try:
        node, where = sources.find(name, scope)
    except Unresolved:
        return (Hint("class"),)
    if isinstance(node, ast.ClassDef):
        return (Hint(_class_kind(node, sources, where)),)
    return hints(node, sources, where) if isinstance(node, ast.expr) else (Hint("class"),)


def _class_kind(node: ast.ClassDef, sources: Sources, scope: Scope) -> str:
    """Whether a class is a dataclass (its value is JSON), a dictionary, or something else."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if getattr(called, "id", getattr(called, "attr", "")) in {"dataclass", "config"}:
            return "dataclass"
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return "dict" if any(getattr(base, "id", "") in {"dict", "UserDict"} for base in bases) else "class"
