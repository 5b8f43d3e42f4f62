"""Where each value of a recipe was written: through `extends`, arms and grids, down to file, line and column."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.recipe.expand import ARM_KEYS, Expanded
from harness.strict import Document, Pointer


@dataclass(frozen=True, slots=True)
class Value:
    """One value, or the `null` that took one away; `arm` is None for what all arms share."""

    arm: str | None
    path: str
    value: Any
    where: str
    deleted: bool = False


def written(expanded: Expanded) -> list[Value]:
    """Every value that somebody wrote, of each arm and then of the run; what is not here is a default."""
    found = [value for arm in expanded.arms for value in _values(arm.name, arm.document)]
    aside = {*ARM_KEYS, "arms", "matrix", "zip", "exclude"}  # worked out: they are in the arms
    rest = {key: value for key, value in expanded.document.data.items() if key not in aside}
    whole = expanded.document
    gone = {at: place for at, place in whole.deleted.items() if at[0] not in aside}
    return [*found, *_values(None, Document(whole.path, rest, whole.places, gone))]


def _values(arm: str | None, document: Document) -> Iterator[Value]:
    for pointer, value in _leaves(document.data, ()):
        yield Value(arm, _dotted(pointer), value, str(document.locate(pointer)))
    for pointer, place in document.deleted.items():
        yield Value(arm, _dotted(pointer), None, str(place), deleted=True)


def _leaves(data: Any, pointer: Pointer) -> Iterator[tuple[Pointer, Any]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, (*pointer, key))
    else:
        yield pointer, data


def _dotted(pointer: Pointer) -> str:
    return ".".join(str(step) for step in pointer)
