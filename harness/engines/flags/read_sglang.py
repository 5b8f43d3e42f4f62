"""SGLang's server arguments, from the wheel.

Two layouts are read, and mixtures of them (releases moved over step by step): explicit `add_argument` calls in
`ServerArgs.add_cli_args` (0.5.9 and before), and annotated fields, `name: A[type, Arg(...)] = default`, in
`ServerArgs` itself or in the namespace classes it is assembled from (`_INPUT_NAMESPACES`, seen in 0.5.23). The rules
that turn an annotation into an option are those of `sglang/srt/arg_groups/arg_utils.py`.
"""

import ast
from collections.abc import Iterator
from typing import Any

from harness.engines.flags.arguments import Hint, flag, hints, keyword, keywords
from harness.engines.flags.source import Module, Scope, Sources, local_names
from harness.engines.flags.table import Flag
from harness.errors import InputError

MODULE = "sglang.srt.server_args"


def flags(sources: Sources) -> Iterator[Flag]:
    """Every option of `python -m sglang.launch_server`.

    Raises:
        InputError: the wheel has no server arguments where every release so far has them.
    """
    module = sources.module(MODULE)
    owner = module.names.get("ServerArgs") if module else None
    if module is None or not isinstance(owner, ast.ClassDef):
        raise InputError(f"no `ServerArgs` in `{MODULE}`", hint="is this a wheel of sglang?")
    yield from _fields(owner, sources, Scope(module))
    for name in _namespaces(module):
        space, where = sources.find(name, Scope(module))
        if isinstance(space, ast.ClassDef):
            yield from _fields(space, sources, where)
    for function in owner.body:
        if isinstance(function, ast.FunctionDef) and function.name == "add_cli_args":
            yield from _calls(function, sources, Scope(module, local_names(function)))


def _namespaces(module: Module) -> list[str]:
    listed = module.names.get("_INPUT_NAMESPACES")
    return [item.id for item in listed.elts if isinstance(item, ast.Name)] if isinstance(listed, ast.List) else []


def _calls(function: ast.FunctionDef, sources: Sources, scope: Scope) -> Iterator[Flag]:
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
            if (found := flag(names, keywords(call, sources, scope))) is not None:
                yield found


def _fields(owner: ast.ClassDef, sources: Sources, scope: Scope) -> Iterator[Flag]:
    for item in owner.body:
        match item:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                annotation=ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[hint, *notes])),
            ):
                words = _notes(notes, sources, scope)
                if words is not None and not words.get("no_cli"):
                    yield from _field(name, hint, {**words, "bare": item.value is None}, sources, scope)


def _notes(notes: list[ast.expr], sources: Sources, scope: Scope) -> dict[str, Any] | None:
    """The first note that speaks of the command line: help text alone, or `Arg(...)`."""
    for note in notes:
        match note:
            case ast.Call(func=ast.Name(id="Arg")):
                return {word.arg: keyword(word.arg, word.value, sources, scope) for word in note.keywords if word.arg}
            case ast.Constant(value=str() as text):
                return {"help": text}
            case ast.JoinedStr() | ast.BinOp():
                return {"help": keyword("help", note, sources, scope)}
    return None


def _field(name: str, hint: ast.expr, words: dict[str, Any], sources: Sources, scope: Scope) -> Iterator[Flag]:
    spelling = words.get("cli_name") or "--" + name.replace("_", "-")
    leaves = tuple(leaf for leaf in hints(hint, sources, scope) if leaf.name != "None")
    found = flag([spelling, *(words.get("aliases") or [])], {**words, **_shape(leaves, words)})
    if found is not None:
        yield found


def _shape(leaves: tuple[Hint, ...], words: dict[str, Any]) -> dict[str, Any]:
    """Type, choices and number of values that an annotation implies."""
    if words.get("action") is not None:
        return {"nargs": _action_nargs(words)} if "action_kwargs" in words else {}
    first = leaves[0] if len(leaves) == 1 else Hint("str")
    own = words.get("type_parser")
    if first.name == "literal":
        options = [option for option in first.options if option is not None]
        return {"type": own or _scalar(type(options[0]).__name__), "choices": words.get("choices") or first.options}
    if first.name == "list" and own is None:
        return {"type": _scalar(first.inner[0].name if first.inner else "str"), "nargs": words.get("nargs") or "+"}
    if first.name == "bool":
        return {"action": "store_true"}
    required = words.get("required")
    return {"type": own or _scalar(first.name), "required": words["bare"] if required is None else required}


def _action_nargs(words: dict[str, Any]) -> Any:
    # `action_kwargs` is a dictionary of which only keys survive reading; the one release that uses it means a list.
    return "*" if "nargs" in (words["action_kwargs"] or {}) else None


def _scalar(name: str) -> str:
    return name if name in {"str", "int", "float"} else "str"
