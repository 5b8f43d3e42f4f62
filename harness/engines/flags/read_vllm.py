"""vLLM's server arguments, from the wheel.

`vllm serve` registers options whose types come from configuration dataclasses: `get_kwargs(Config)` turns each field's
annotation into argparse keywords, a few of which are then changed by hand. Both are followed here: the rules of
`vllm/engine/arg_utils.py` (`_compute_kwargs`) in `_shape`, and the functions that register options statement by
statement in `_Reader`.
"""

import ast
from collections.abc import Iterator
from typing import Any

from harness.engines.flags.arguments import Hint, flag, hints, keyword
from harness.engines.flags.source import Scope, Sources, Unresolved
from harness.engines.flags.table import Flag
from harness.errors import InputError

ENGINE = "vllm.engine.arg_utils"
# Where releases have kept `make_arg_parser` and the front end's own options, newest first.
SERVERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)

# Fields that take sizes such as `8k`; named in `_compute_kwargs`.
_SIZES = {
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "kv_cache_memory_bytes",
    "safetensors_prefetch_block_size",
    "max_num_queued_tokens",
}

Words = dict[str, Any]


def flags(sources: Sources) -> Iterator[Flag]:
    """Every option of `vllm serve`.

    Raises:
        InputError: the wheel has no server arguments where the known releases have them.
    """
    server = next((module for name in SERVERS if (module := sources.module(name)) is not None), None)
    engine = sources.module(ENGINE)
    if server is None or engine is None:
        raise InputError(f"no `make_arg_parser` in {', '.join(f'`{name}`' for name in SERVERS)}")
    front = Scope(server)
    yield from _Reader(sources, front).run(_function(server.names.get("make_arg_parser")))
    yield from _front_end(sources, front)
    for owner in ("EngineArgs", "AsyncEngineArgs"):
        yield from _Reader(sources, Scope(engine)).run(_method(engine.names.get(owner), "add_cli_args"))


def _front_end(sources: Sources, scope: Scope) -> Iterator[Flag]:
    """Each field of `FrontendArgs` and its bases is an option, after `_customize_cli_kwargs` had its say."""
    words: dict[str, Words] = {}
    for owner, where in reversed(_bases("FrontendArgs", sources, scope)):
        words |= _fields(owner, sources, where)
        customise = _method(owner, "_customize_cli_kwargs")
        reader = _Reader(sources, where, {"frontend_kwargs": words})
        # Drained for its effect on `words`: this method registers nothing.
        list(reader.run(customise))
    for name, entry in words.items():
        extra = list(entry.pop("flags", ()))
        if (found := flag([*extra, "--" + name.replace("_", "-")], entry)) is not None:
            yield found


def _bases(name: str, sources: Sources, scope: Scope) -> list[tuple[ast.ClassDef, Scope]]:
    """A class and its bases inside the wheel, nearest first."""
    try:
        node, where = sources.find(name, scope)
    except Unresolved:
        return []
    if not isinstance(node, ast.ClassDef):
        return []
    above = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return [(node, where), *(found for base in above for found in _bases(base, sources, where))]


class _Reader:
    """Follows the statements of a function that registers options, keeping the keyword dictionaries it builds."""

    def __init__(self, sources: Sources, scope: Scope, local: dict[str, Any] | None = None) -> None:
        self.sources = sources
        self.scope = scope
        self.local: dict[str, Any] = dict(local or {})

    def run(self, function: ast.FunctionDef | None) -> Iterator[Flag]:
        """The options a function registers; none when there is no such function."""
        if function is not None:
            yield from self._block(function.body)

    def _block(self, body: list[ast.stmt]) -> Iterator[Flag]:
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    # A value that cannot be followed (`super()._customize(words)`) leaves what was known.
                    self.local[name] = self._words(value) or self.local.get(name)
                case ast.Assign(targets=[ast.Subscript() as place], value=value):
                    self._set(place, value)
                case ast.Delete(targets=[ast.Subscript() as place]):
                    self._delete(place)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="add_argument")) as call):
                    yield from self._register(call)
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Subscript() as place, attr="remove"), args=[gone])
                ):
                    self._remove(place, gone)
                case ast.If(body=then, orelse=otherwise):
                    yield from self._block(then)
                    yield from self._block(otherwise)

    def _words(self, node: ast.expr) -> Any:
        """The dictionary an expression stands for: `get_kwargs(C)`, `name`, `name["field"]`, `{**x, "key": ...}`."""
        match node:
            case ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=name)]):
                return {
                    field: words
                    for owner, where in reversed(_bases(name, self.sources, self.scope))
                    for field, words in _fields(owner, self.sources, where).items()
                }
            case ast.Name(id=name):
                return self.local.get(name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                owner = self._words(inner)
                return owner.get(key) if isinstance(owner, dict) else None
            case ast.Dict(keys=keys, values=values):
                return self._display(keys, values)
        return None

    def _display(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Words:
        words: Words = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                words |= self._words(value) or {}
            elif isinstance(key, ast.Constant):
                words[str(key.value)] = keyword(str(key.value), value, self.sources, self.scope)
        return words

    def _set(self, place: ast.Subscript, value: ast.expr) -> None:
        owner = self._words(place.value)
        if isinstance(owner, dict) and isinstance(place.slice, ast.Constant):
            name = str(place.slice.value)
            owner[name] = keyword(name, value, self.sources, self.scope)

    def _delete(self, place: ast.Subscript) -> None:
        owner = self._words(place.value)
        if isinstance(owner, dict) and isinstance(place.slice, ast.Constant):
            owner.pop(place.slice.value, None)

    def _remove(self, place: ast.Subscript, gone: ast.expr) -> None:
        """`words["field"]["choices"].remove(VALUE)`."""
        listed = self._words(place)
        if isinstance(listed, list):
            value = str(self.sources.value(gone, self.scope))
            listed[:] = [option for option in listed if option != value]

    def _register(self, call: ast.Call) -> Iterator[Flag]:
        names = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
        words: Words = {}
        for word in call.keywords:
            if word.arg is None:
                words |= self._words(word.value) or {}
            else:
                words[word.arg] = keyword(word.arg, word.value, self.sources, self.scope)
        if (found := flag(names, words)) is not None:
            yield found


def _fields(owner: ast.ClassDef, sources: Sources, scope: Scope) -> dict[str, Words]:
    """argparse keywords for the fields of one configuration class."""
    return {
        item.target.id: _shape(item.target.id, hints(item.annotation, sources, scope))
        for item in owner.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _shape(name: str, leaves: tuple[Hint, ...]) -> Words:  # noqa: PLR0911 - one line a kind, in upstream's order
    """Keywords for one annotation, in `_compute_kwargs`'s order of precedence."""
    kinds = {leaf.name: leaf for leaf in reversed(leaves)}
    if "dataclass" in kinds:
        return {"type": "json"}
    if set(kinds) == {"bool", "str", "None"}:
        return {"type": "str", "nargs": "?"}
    if "bool" in kinds:
        return {"action": {"class": "BooleanOptionalAction"}}
    if "literal" in kinds:
        return _literal(kinds["literal"], open_ended="str" in kinds, optional="None" in kinds)
    for collection in ("tuple", "list", "set"):
        if collection in kinds:
            return _collection(kinds[collection], optional="None" in kinds)
    if "int" in kinds:
        return {"type": "size" if name in _SIZES else "int"}
    if "float" in kinds:
        return {"type": "float"}
    if "dict" in kinds:
        # With a string or a class beside it, text that is not JSON is passed on as it is.
        return {"type": "other" if kinds.keys() & {"str", "class"} else "json"}
    return {"type": "str"}


def _literal(leaf: Hint, *, open_ended: bool, optional: bool) -> Words:
    kind = type(leaf.options[0]).__name__ if leaf.options else "str"
    if open_ended:
        return {"type": kind}
    return {"type": kind, "choices": [*sorted(map(str, leaf.options)), *(["None"] if optional else [])]}


def _collection(leaf: Hint, *, optional: bool) -> Words:
    inner = [part for part in leaf.inner if part.name != "None"]
    words: Words = {"nargs": "+" if leaf.variadic else 2, "type": "str"}
    if len(inner) == 1 and inner[0].name == "literal":
        return {**words, **_literal(inner[0], open_ended=False, optional=optional)}
    if len(inner) == 1 and inner[0].name in {"int", "float"}:
        words["type"] = inner[0].name
    return words


def _function(node: ast.AST | None) -> ast.FunctionDef | None:
    return node if isinstance(node, ast.FunctionDef) else None


def _method(owner: ast.AST | None, name: str) -> ast.FunctionDef | None:
    body = owner.body if isinstance(owner, ast.ClassDef) else []
    return next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == name), None)
