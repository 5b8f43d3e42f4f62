"""Constants read from Python source inside a wheel, without importing any of it.

An engine's server arguments are written as literals, module constants, enum members and names imported from
neighbouring modules. `Sources` follows those names through the wheel's own files; what it cannot follow raises
`Unresolved`, and the reader then records "not known" instead of a guess.
"""

import ast
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import InputError

_DEPTH = 40


class Unresolved(Exception):
    """A value that cannot be known without running the code."""


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed module and what its top level binds."""

    name: str
    names: Mapping[str, ast.AST]
    package: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a name is looked up: local assignments of a function first, then its module."""

    module: Module
    local: Mapping[str, ast.AST] = field(default_factory=dict)


class Sources:
    """The Python modules of one wheel.

    Args:
        read: text of a file by its path in the wheel, None when there is none.
        paths: every path in the wheel, where that is known.
    """

    def __init__(self, read: Callable[[str], str | None], paths: Iterable[str] = ()) -> None:
        self._read = read
        self._paths = tuple(paths)
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def of_wheel(cls, wheel: Path) -> "Sources":
        """Sources of a wheel on disk; only the files asked for are unpacked, into memory.

        Raises:
            InputError: the file cannot be opened as a wheel.
        """
        try:
            archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(f"cannot read `{wheel}` as a wheel: {error}") from error
        names = set(archive.namelist())
        return cls(lambda path: archive.read(path).decode() if path in names else None, archive.namelist())

    def mentions(self, pattern: re.Pattern[str], under: str) -> frozenset[str]:
        """Everything that matches a pattern in the Python files under a path."""
        texts = (self._read(path) for path in self._paths if path.startswith(under) and path.endswith(".py"))
        return frozenset(word for text in texts if text is not None for word in pattern.findall(text))

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None when the wheel does not hold it."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        stem = name.replace(".", "/")
        for path, package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            if (text := self._read(path)) is not None:
                return Module(name, _bound(ast.parse(text).body), package)
        return None

    def find(self, name: str, scope: Scope, depth: int = 0) -> tuple[ast.AST, Scope]:
        """What a name is bound to, and the scope its own names are looked up in; imports are followed.

        Raises:
            Unresolved: nothing in the wheel binds it.
        """
        node = scope.local.get(name)
        if node is None:
            node, scope = scope.module.names.get(name), Scope(scope.module)
        if node is None or depth > _DEPTH:
            raise Unresolved(name)
        if isinstance(node, ast.ImportFrom):
            return self._imported(node, name, scope.module, depth + 1)
        return node, scope

    def _imported(self, node: ast.ImportFrom, name: str, importer: Module, depth: int) -> tuple[ast.AST, Scope]:
        original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
        target = self.module(_absolute(node, importer))
        if target is None:
            raise Unresolved(name)
        return self.find(original, Scope(target), depth)

    def value(self, node: ast.AST, scope: Scope) -> Any:  # noqa: PLR0911 - one line a kind of expression
        """The value of an expression made of constants.

        Raises:
            Unresolved: any part of it needs the code to run.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [value for item in items for value in self._items(item, scope)]
            case ast.Dict(keys=keys):
                # Only the keys matter to us: registries map option names to classes.
                return {self.value(key, scope): None for key in keys if key is not None}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.value(left, scope) + self.value(right, scope)
            case ast.JoinedStr():
                return "".join(_text(self, part, scope) for part in node.values)
            case ast.Name(id=name):
                return self._named(name, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inside):
                return self.options(inside, scope)
        raise Unresolved(ast.dump(node)[:60])

    def options(self, inside: ast.expr, scope: Scope) -> list[Any]:
        """The options of `Literal[...]`; a `Literal` within one contributes its own."""
        parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        return [option for part in parts for option in _listed(self.value(part, scope))]

    def _items(self, node: ast.expr, scope: Scope) -> list[Any]:
        """What one place of a display contributes: `*names` contributes all of `names`."""
        if isinstance(node, ast.Starred):
            return _listed(self.value(node.value, scope))
        return [self.value(node, scope)]

    def _named(self, name: str, scope: Scope) -> Any:
        node, where = self.find(name, scope)
        if isinstance(node, ast.ClassDef):
            return members(node)
        if isinstance(node, ast.FunctionDef):
            raise Unresolved(name)
        return self.value(node, where)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        """`Class.MEMBER` and `Class.TABLE`."""
        if not isinstance(node.value, ast.Name):
            raise Unresolved(node.attr)
        owner, where = self.find(node.value.id, scope)
        if not isinstance(owner, ast.ClassDef):
            raise Unresolved(node.attr)
        bound = _bound(owner.body)
        if node.attr not in bound:
            raise Unresolved(node.attr)
        return self.value(bound[node.attr], Scope(where.module, bound))

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        """`list(x)`, `sorted(x)`, `set(x)`, `x.keys()`, `get_args(X)`, and functions of no arguments."""
        match node:
            case ast.Call(func=ast.Attribute(value=inner, attr="keys"), args=[]):
                return list(self.value(inner, scope))
            case ast.Call(func=ast.Attribute(value=inner, attr="copy"), args=[]):
                return self.value(inner, scope)
            case ast.Call(
                func=ast.Name(id="list" | "tuple" | "set" | "frozenset" | "sorted" | "get_args"), args=[inner]
            ):
                return _listed(self.value(inner, scope))
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                return self._returned(name, scope)
        raise Unresolved(ast.dump(node.func)[:60])

    def _returned(self, name: str, scope: Scope) -> Any:
        """What a function of no arguments returns on its last line."""
        function, where = self.find(name, scope)
        if not isinstance(function, ast.FunctionDef) or not function.body:
            raise Unresolved(name)
        last = function.body[-1]
        if not isinstance(last, ast.Return) or last.value is None:
            raise Unresolved(name)
        return self.value(last.value, Scope(where.module, _bound(function.body)))


def members(node: ast.ClassDef) -> list[Any]:
    """The values of an enum's members that are plain constants."""
    return [
        item.value.value for item in node.body if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant)
    ]


def local_names(function: ast.FunctionDef) -> dict[str, ast.AST]:
    """What a function's own body binds."""
    return _bound(function.body)


def _bound(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """What a block binds. A class keeps its name even where it is rebound to something made from it."""
    bound: dict[str, ast.AST] = {}
    for name, node in _bindings(body):
        if not isinstance(bound.get(name), ast.ClassDef) or isinstance(node, ast.ClassDef):
            bound[name] = node
    return bound


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names a block binds, later ones winning; the branches of `if` and `try` count as the block itself."""
    for node in body:
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                yield name, value
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, node) for alias in names)
            case ast.If(body=then, orelse=otherwise):
                yield from _bindings(then)
                yield from _bindings(otherwise)
            case ast.Try(body=then):
                yield from _bindings(then)


def _absolute(node: ast.ImportFrom, importer: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = importer.name.split(".")
    base = parts[: len(parts) - node.level + importer.package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set | dict) else [value]


def _text(sources: Sources, part: ast.expr, scope: Scope) -> str:
    """A piece of an f-string; what cannot be known becomes an ellipsis, because it is only ever prose."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    try:
        return str(sources.value(part.value, scope)) if isinstance(part, ast.FormattedValue) else "..."
    except Unresolved:
        return "..."
