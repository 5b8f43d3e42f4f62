"""`matrix`, `zip` and `exclude`: the combinations of values that a recipe, or one of its arms, goes through."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import Fault, Location
from harness.files import digest
from harness.recipe.schema import Grid
from harness.strict import Document, Pointer, suggest

_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,31}")
SECTIONS = ("matrix", "zip")


@dataclass(frozen=True, slots=True)
class Varied:
    """One grid and what holds it: the recipe, `()`, or an arm, `("arms", NAME)`."""

    grid: Grid
    at: Pointer = ()

    @property
    def paths(self) -> list[str]:
        """The dotted paths that it varies."""
        return [*self.grid.matrix, *self.grid.zip]


def points(varied: Sequence[Varied]) -> Iterator[dict[str, Any]]:
    """Every combination of several grids that none of them excludes, as dotted path -> value."""
    leave = [pattern for one in varied for pattern in one.grid.exclude]
    for parts in itertools.product(*(list(_points(one.grid)) for one in varied)):
        point = {path: value for part in parts for path, value in part.items()}
        if not any(all(point.get(key) == value for key, value in pattern.items()) for pattern in leave):
            yield point


def suffix(point: Mapping[str, Any]) -> str:
    """What a combination adds to its arm's name; words that all its names begin with are left out.

    `speculative-num-steps` and `speculative-eagle-topk` give `,num-steps=3,eagle-topk=1`.
    """
    names = [path.rsplit(".", 1)[-1].split("-") for path in point]
    same = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*(name[:-1] for name in names), strict=False))
    start = len(list(same)) if len(names) > 1 else 0
    return "".join(
        f",{'-'.join(name[start:])}={_plain(value)}" for name, value in zip(names, point.values(), strict=True)
    )


def document_of(document: Document, point: Mapping[str, Any], varied: Sequence[Varied]) -> Document:
    """A combination as a document to lay over its arm; each value's place is its item in the list it is from."""
    data: dict[str, Any] = {}
    places: dict[Pointer, Location] = {(): Location(document.path, 1, 1)}
    for path, value in point.items():
        steps = path.split(".")
        inner = data
        for step in steps[:-1]:
            inner = inner.setdefault(step, {})
        inner[steps[-1]] = value
        if place := document.locate(_written(path, value, varied)):
            places[tuple(steps)] = place
    return Document(document.path, data, places)


def faults(document: Document, varied: Sequence[Varied], roots: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with the last of several grids, given those before it."""
    last = varied[-1]
    everywhere = [path for one in varied for path in one.paths]
    for section in SECTIONS:
        for path in getattr(last.grid, section):
            where = (*last.at, section, path)
            if path.split(".")[0] not in roots:
                yield document.fault(where, f"`{section}` cannot vary `{path}`", suggest(path, roots))
            clash = [other for other in everywhere if other.startswith(f"{path}.")]
            if clash or everywhere.count(path) > 1:
                yield document.fault(where, f"`{path}` is varied twice: it holds `{(clash or [path])[0]}`")
    lengths = {path: len(values) for path, values in last.grid.zip.items()}
    if len(set(lengths.values())) > 1:
        yield document.fault((*last.at, "zip"), f"`zip` lists differ in length: {lengths}")
    for index, pattern in enumerate(last.grid.exclude):
        for path in pattern:
            if path not in everywhere:
                where = (*last.at, "exclude", index, path)
                yield document.fault(where, f"`exclude` names `{path}`, which is not varied", suggest(path, everywhere))
    if not any(True for _ in points(varied)):
        yield document.fault((*last.at, "exclude"), "`exclude` leaves no combination")


def _points(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every point of `matrix` x `zip`, nothing excluded yet."""
    columns = list(zip(*grid.zip.values(), strict=False)) if grid.zip else [()]
    for values in itertools.product(*grid.matrix.values()):
        for column in columns:
            yield {**dict(zip(grid.matrix, values, strict=True)), **dict(zip(grid.zip, column, strict=False))}


def _written(path: str, value: Any, varied: Sequence[Varied]) -> Pointer:
    """Where a combination's value stands in the recipe."""
    for one in varied:
        for section in SECTIONS:
            values = getattr(one.grid, section).get(path, [])
            if value in values:
                return (*one.at, section, path, values.index(value))
    return ()


def _plain(value: Any) -> str:
    """A value as part of an arm's name, which is a folder's name too: one that is not plain goes by its digest."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else digest(text)[:8]
