"""Files people write, read strictly: YAML with positions, models without unknown keys, every fault at once.

`read` gives plain data plus the place each value came from; `merge` lays one document over another and keeps those
places, so that a fault in an inherited value names the line it was written on; `parse` turns data into a model.
"""

import datetime
import difflib
import json
import math
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from harness.errors import Fault, InputError, Location

Pointer = tuple[str | int, ...]
_FILES_NAMED = 8  # files of a folder that a hint names
_MOST_VALUES = 100_000
_MOST_COPIES = 10_000  # by aliases: some hundred bytes of them could write out to more than memory holds


class Strict(BaseModel):
    """Base of every model read from a file: frozen, no coercion, unknown keys refused."""

    # Built when first used: a file has one model at its top, and those inside it need no validator of their own.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data from a YAML file, where each value was written, and where a `null` took one away."""

    path: str
    data: Any
    places: Mapping[Pointer, Location] = field(default_factory=dict)
    deleted: Mapping[Pointer, Location] = field(default_factory=dict)

    def locate(self, pointer: Pointer) -> Location | None:
        """Where a value was written: its own place, or its nearest ancestor's."""
        for length in range(len(pointer), -1, -1):
            if (place := self.places.get(pointer[:length])) is not None:
                return place
        return None

    def fault(self, pointer: Pointer, message: str, hint: str | None = None) -> Fault:
        """A fault at a value of this document."""
        return Fault(message, self.locate(pointer), hint)

    def without(self, places: Collection[Location | None]) -> "Document":
        """The document less the values that were written at some places, so that the rest can be judged."""
        return replace(self, data=self._less((), self.data, places))

    def _less(self, pointer: Pointer, data: Any, places: Collection[Location | None]) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {key: value for key, value in data.items() if self.places.get((*pointer, key)) not in places}
        return {key: self._less((*pointer, key), value, places) for key, value in kept.items()}


def read(path: Path) -> Document:
    """Read one YAML file (YAML 1.2, duplicate keys refused).

    Raises:
        InputError: the file cannot be read, is not YAML, or is not a mapping; with line and column where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}", hint=_beside(path)) from error
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"`{path}` is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return read_text(text, str(path))


def read_text(text: str, path: str) -> Document:
    """`read` for text already in hand; `path` is what messages call it."""
    try:
        tree = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        mark = error.problem_mark
        raise InputError.of([Fault(_first_line(error.problem), _at(path, mark))]) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError.of([Fault(f"not valid YAML: {_first_line(error.problem)}", _at(path, mark))]) from error
    except (YAMLError, ValueError) as error:
        raise InputError(f"`{path}` is not valid YAML: {_first_line(str(error))}") from error
    except RecursionError as error:
        raise InputError(f"`{path}` is nested too deep to be read") from error
    except AttributeError as error:  # how the library takes `a: &a {<<: *a}`
        raise InputError(f"`{path}` is not valid YAML: an alias stands in what it names") from error
    places: dict[Pointer, Location] = {(): Location(path, 1, 1)}
    faults: list[Fault] = []
    most = min(_MOST_VALUES, _MOST_COPIES + len(text))  # no value is written with less than a character
    try:
        data = _plain(tree, (), _Reading(path, places, faults, most))
    except RecursionError as error:
        raise InputError(f"`{path}` is nested too deep to be read") from error
    if not isinstance(data, dict):
        seen = "empty" if data is None else f"a {type(data).__name__}"
        faults.append(Fault(f"a mapping was expected at the top, the file is {seen}", places[()]))
    if faults:
        raise InputError.of(faults)
    return Document(path, data, places)


def merge(base: Document, over: Document) -> Document:
    """Lay `over` on `base`: mappings merge, everything else replaces, `null` deletes; places follow their values."""
    places = dict(base.places)
    data = _merge(base.data, over.data, (), places, over.places)
    gone = dict(base.deleted) | {pointer: over.places[pointer] for pointer in _deletions(base.data, over.data, ())}
    return Document(over.path, data, places, {at: place for at, place in gone.items() if at not in places})


def parse(document: Document, model: type[M], *, under: Pointer = ()) -> M:
    """Check a document's data against a model.

    Args:
        document: what `read` or `merge` gave.
        model: the strict model.
        under: the part of the document to take.

    Raises:
        InputError: every fault at once, each with its line and, for a misspelt key, a suggestion.
    """
    data = document.data
    for step in under:
        data = data[step]
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        faults = [_explain(document, data, under, model, dict(item)) for item in error.errors()]
        raise InputError.of(_unique(faults)) from error


def suggest(word: str, known: Iterable[str]) -> str | None:
    """A hint for a misspelt word, or the list of what there is when nothing is near."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return "known: " + ", ".join(f"`{choice}`" for choice in choices) if choices else None


def _beside(path: Path) -> str | None:
    """A hint for a file that is not there: the one of the nearest name in its folder, or some that there are."""
    if not path.parent.is_dir():
        return f"there is no folder `{path.parent}`"
    files = {found.stem: str(found) for found in sorted(path.parent.glob("*.y*ml"))}
    if near := difflib.get_close_matches(path.stem, files, n=1, cutoff=0.6):
        return f"did you mean `{files[near[0]]}`?"
    more = ", ..." if len(files) > _FILES_NAMED else ""
    return "there are: " + ", ".join(f"`{file}`" for file in [*files.values()][:_FILES_NAMED]) + more if files else None


@dataclass(frozen=True, slots=True)
class _Reading:
    """A file being made into plain values: where each was written, what is wrong, and how many there may be."""

    path: str
    places: dict[Pointer, Location]
    faults: list[Fault]
    most: int

    def note(self, pointer: Pointer, line: int, column: int) -> None:
        """Note where a value was written, counted from 0."""
        if len(self.places) > self.most:
            raise InputError(
                f"`{self.path}` holds more than {self.most} values, with its aliases written out",
                hint="aliases of aliases multiply: write out what is needed",
            )
        self.places[pointer] = Location(self.path, line + 1, column + 1)


def _plain(node: Any, pointer: Pointer, reading: _Reading) -> Any:
    """Round-trip YAML nodes to plain values, noting the place of each."""
    if isinstance(node, CommentedMap):
        result: dict[str, Any] = {}
        for key, value in node.items():
            line, column = node.lc.key(key) if key in (node.lc.data or {}) else (node.lc.line, node.lc.col)
            if not isinstance(key, str):
                place = Location(reading.path, line + 1, column + 1)
                reading.faults.append(Fault(f"keys are text, got `{key}`", place, "put it in quotes"))
                continue
            below = (*pointer, str(key))
            reading.note(below, line, column)
            result[str(key)] = _plain(value, below, reading)
        return result
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            reading.note((*pointer, index), *node.lc.item(index))
            items.append(_plain(value, (*pointer, index), reading))
        return items
    return _scalar(node, pointer, reading)


def _scalar(node: Any, pointer: Pointer, reading: _Reading) -> Any:
    where = reading.places.get(pointer, Location(reading.path, 1, 1))
    if node is None or isinstance(node, bool):
        return node
    if isinstance(node, datetime.date | datetime.datetime):
        return node.isoformat()
    if isinstance(node, float) and not math.isfinite(node):
        reading.faults.append(Fault(f"a finite number was expected, got {float(node)}", where))
        return None
    for plain in (int, float, str):
        if isinstance(node, plain):
            return plain(node)
    reading.faults.append(Fault(f"plain YAML was expected, got a {type(node).__name__}", where))
    return None


def _merge(
    base: Any, over: Any, pointer: Pointer, places: dict[Pointer, Location], new: Mapping[Pointer, Location]
) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        result = dict(base)
        for key, value in over.items():
            below = (*pointer, key)
            if value is None:
                result.pop(key, None)
                _forget(places, below)
            elif key in result:
                result[key] = _merge(result[key], value, below, places, new)
            else:
                result[key] = _stripped(value)
                _adopt(places, below, new)
        if pointer in new:
            places[pointer] = new[pointer]
        return result
    _forget(places, pointer)
    _adopt(places, pointer, new)
    return _stripped(over)


def _stripped(value: Any) -> Any:
    """A value without its `null` entries: deleting what is not there is nothing."""
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if item is not None}
    return value


def _deletions(base: Any, over: Any, pointer: Pointer) -> Iterator[Pointer]:
    """What `over` takes away from `base` with a `null`."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return
    for key in over.keys() & base.keys():
        if over[key] is None:
            yield (*pointer, key)
        else:
            yield from _deletions(base[key], over[key], (*pointer, key))


def _forget(places: dict[Pointer, Location], pointer: Pointer) -> None:
    for known in [known for known in places if known[: len(pointer)] == pointer]:
        del places[known]


def _adopt(places: dict[Pointer, Location], pointer: Pointer, new: Mapping[Pointer, Location]) -> None:
    places.update({known: place for known, place in new.items() if known[: len(pointer)] == pointer})


def _explain(document: Document, data: Any, under: Pointer, model: type[BaseModel], error: dict[str, Any]) -> Fault:
    """One pydantic error in the words of someone who writes YAML."""
    kind, context = str(error["type"]), error.get("ctx") or {}
    pointer, known_at = _pointer(data, model, tuple(error["loc"]), missing=kind == "missing")
    name = _dotted((*under, *pointer))
    hint = None
    if kind == "extra_forbidden":
        message = f"unknown key `{name}`"
        hint = suggest(str(pointer[-1]), known_at)
    elif kind == "missing":
        message = f"`{name}` is missing"
        pointer = pointer[:-1]
    else:
        seen = error.get("input")
        message = f"`{name}`: {_sentence(kind, str(error['msg']), context)}"
        if not isinstance(seen, dict | list):
            message += f", got {_shown(seen)}"
        if kind in {"string_type"} and isinstance(seen, int | float):
            hint = f'put it in quotes: "{seen}"'
        elif kind in {"literal_error", "enum"} and isinstance(seen, str):
            hint = suggest(
                seen,
                [word.strip().strip("'") for word in str(context.get("expected", "")).replace(" or ", ",").split(",")],
            )
    return Fault(message, document.locate((*under, *pointer)), hint)


def _pointer(data: Any, model: Any, loc: Pointer, *, missing: bool) -> tuple[Pointer, set[str]]:
    """A pydantic `loc` without the tags of unions, and the keys known at its last step."""
    pointer: list[str | int] = []
    known: set[str] = set()
    here: Any = data
    annotations: list[Any] = [model]
    for position, step in enumerate(loc):
        fields = _fields(annotations)
        last = position == len(loc) - 1
        inside = (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        )
        if not inside and not (last and missing):
            annotations = [a for a in annotations if getattr(a, "__name__", None) == step] or annotations
            continue
        pointer.append(step)
        known = set(fields)
        annotations = _below(annotations, fields, step)
        here = here[step] if inside else None
    return tuple(pointer), known


def _models(annotation: Any) -> list[Any]:
    """The models an annotation may stand for."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType, typing.Annotated}:
        return [found for part in typing.get_args(annotation) for found in _models(part)]
    return []


def _fields(annotations: list[Any]) -> dict[str, Any]:
    return {
        info.alias or name: info.annotation
        for annotation in annotations
        for found in _models(annotation)
        for name, info in found.model_fields.items()
    }


def _below(annotations: list[Any], fields: Mapping[str, Any], step: str | int) -> list[Any]:
    if step in fields:
        return [fields[str(step)]]
    below: list[Any] = []
    for annotation in annotations:
        for part in [annotation, *typing.get_args(annotation)]:
            if typing.get_origin(part) in {list, tuple, dict}:
                below += [inner for inner in typing.get_args(part) if inner is not Ellipsis and inner is not str]
    return below


def _sentence(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']:g}"
    if kind == "greater_than":
        return f"must be greater than {context['gt']:g}"
    if kind == "less_than_equal":
        return f"must be at most {context['le']:g}"
    if kind == "too_short":
        return (
            "must not be empty"
            if context.get("min_length") == 1
            else f"needs at least {context.get('min_length')} items"
        )
    plain = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return plain if kind == "value_error" else f"must be {plain}" if message.startswith("Input should be ") else plain


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"`{text if len(text) <= 80 else text[:77] + '...'}`"


def _dotted(pointer: Pointer) -> str:
    text = ""
    for step in pointer:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text or "the file"


def _unique(faults: Iterable[Fault]) -> list[Fault]:
    return list(dict.fromkeys(faults))


def _at(path: str, mark: Any) -> Location | None:
    return Location(path, mark.line + 1, mark.column + 1) if mark else None


def _first_line(text: str | None) -> str:
    return (text or "unreadable").strip().splitlines()[0]
