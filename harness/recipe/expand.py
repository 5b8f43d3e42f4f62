"""A recipe file becomes arms: `extends` and `matrix` are worked out, each arm is laid over the recipe, all is checked.

Every value keeps the place it was written at, through inheritance, arm and matrix, so that a fault names that line.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import Fault, InputError, Location
from harness.files import digest
from harness.recipe.schema import Compare, Recipe, Setup
from harness.strict import Document, M, Pointer, merge, parse, read, suggest

_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,31}")
ARM_KEYS = ("env", "model", "server", "workload")


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm, worked out to the end; `overrides` are the dotted paths in which it departs from the recipe."""

    name: str
    setup: Setup
    document: Document
    overrides: tuple[str, ...]

    def place(self, *pointer: str | int) -> Location | None:
        """Where a value of this arm was written."""
        return self.document.locate(pointer)


@dataclass(frozen=True, slots=True)
class Expanded:
    """A recipe with its arms."""

    path: Path
    recipe: Recipe
    document: Document
    arms: tuple[Arm, ...]

    def arm(self, name: str) -> Arm:
        """One arm by name."""
        return next(arm for arm in self.arms if arm.name == name)


def load(path: Path) -> Expanded:
    """Read a recipe and work out its arms.

    Raises:
        InputError: all faults of the recipe at once, each with file, line and column.
    """
    document = _inherited(path, ())
    faults: list[Fault] = []
    recipe = _checked(document, Recipe, faults)
    if recipe is not None and (grid := list(_grid_faults(document, recipe))):
        raise InputError.of(grid)
    arms: list[Arm] = []
    for name, arm_document, overrides in _arms(document, recipe, faults):
        if (setup := _checked(arm_document, Setup, faults)) is not None:
            arms.append(Arm(name, setup, arm_document, overrides))
    if recipe is not None:
        faults += _reference_faults(document, recipe, [arm.name for arm in arms])
    if faults or recipe is None:
        raise InputError.of(list(dict.fromkeys(faults)))
    return Expanded(path, recipe, document, tuple(arms))


def _checked(document: Document, model: type[M], faults: list[Fault]) -> M | None:
    """A document as its model, or None with its faults added."""
    try:
        return parse(document, model)
    except InputError as error:
        faults += error.faults
        return None


def _inherited(path: Path, chain: tuple[Path, ...]) -> Document:
    """A document with what it extends laid under it."""
    here = path.resolve()
    document = read(path)
    base = document.data.pop("extends", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise InputError.of([document.fault(("extends",), "`extends` names one recipe file")])
    if here in chain:
        raise InputError.of([document.fault(("extends",), f"`extends` goes in a circle through `{path}`")])
    parent = path.parent / base
    if not parent.is_file():
        known = [str(found.relative_to(path.parent)) for found in path.parent.glob("*.yaml") if found.resolve() != here]
        raise InputError.of([document.fault(("extends",), f"there is no `{parent}`", suggest(base, known))])
    return merge(_inherited(parent, (*chain, here)), document)


def _arms(
    document: Document, recipe: Recipe | None, faults: list[Fault]
) -> Iterator[tuple[str, Document, tuple[str, ...]]]:
    """Each arm laid over the recipe, its name, and the paths it sets; a recipe that is faulty has no matrix yet."""
    base = _slice(document, (), {key: document.data[key] for key in ARM_KEYS if key in document.data})
    arms = document.data.get("arms") or {"only": {}}
    for name in arms if isinstance(arms, dict) else ():
        pointer: Pointer = ("arms", name)
        data = arms[name] if isinstance(arms[name], dict) else {}
        wrong = [key for key in data if key not in ARM_KEYS]
        faults += [
            document.fault((*pointer, key), f"an arm cannot set `{key}`", suggest(key, ARM_KEYS)) for key in wrong
        ]
        arm = _slice(document, pointer, {key: value for key, value in data.items() if key in ARM_KEYS})
        laid = merge(base, arm)
        overrides = tuple(sorted(_leaves(arm.data)))
        if recipe is None:
            yield name, laid, overrides
            continue
        for suffix, point, combination in _combinations(document, recipe):
            paths = tuple(sorted({*overrides, *combination}))
            yield name + suffix, merge(laid, point) if combination else laid, paths


def _slice(document: Document, pointer: Pointer, data: dict[str, Any]) -> Document:
    """The part of a document under `pointer` as a document of its own, places kept."""
    size = len(pointer)
    places = {
        known[size:]: place
        for known, place in document.places.items()
        if known[:size] == pointer and (len(known) == size or known[size] in data)
    }
    places.setdefault((), document.locate(pointer) or Location(document.path, 1, 1))
    return Document(document.path, data, places)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _combinations(document: Document, recipe: Recipe) -> Iterator[tuple[str, Document, Mapping[str, Any]]]:
    """Every point that is not excluded, as a name suffix and a document to lay on."""
    for point in _points(recipe):
        suffix = "".join(f",{path.rsplit('.', 1)[-1]}={_plain(value)}" for path, value in point.items())
        yield suffix, _point_document(document, point, recipe), point


def _points(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Every point of `matrix` x `zip` that is not excluded."""
    names = list(recipe.matrix)
    zipped = list(recipe.zip)
    columns = list(zip(*recipe.zip.values(), strict=False)) if zipped else [()]
    for values in itertools.product(*recipe.matrix.values()):
        for column in columns:
            point = {**dict(zip(names, values, strict=True)), **dict(zip(zipped, column, strict=False))}
            if any(all(point.get(key) == value for key, value in leave.items()) for leave in recipe.exclude):
                continue
            yield point


def _plain(value: Any) -> str:
    """A value as part of an arm's name, which is a folder's name too: one that is not plain goes by its digest."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else digest(text)[:8]


def _point_document(document: Document, point: Mapping[str, Any], recipe: Recipe) -> Document:
    data: dict[str, Any] = {}
    places: dict[Pointer, Location] = {(): Location(document.path, 1, 1)}
    for path, value in point.items():
        steps = path.split(".")
        inner = data
        for step in steps[:-1]:
            inner = inner.setdefault(step, {})
        inner[steps[-1]] = value
        section = "matrix" if path in recipe.matrix else "zip"
        index = list(getattr(recipe, section)[path]).index(value)
        if place := document.locate((section, path, index)):
            places[tuple(steps)] = place
    return Document(document.path, data, places)


def _reference_faults(document: Document, recipe: Recipe, arms: list[str]) -> Iterator[Fault]:
    """Names in the recipe that must name one of its arms; sections that must fit each other."""
    if recipe.compare and arms and recipe.compare.base not in arms:
        yield document.fault(
            ("compare", "base"),
            f"`compare.base` names no arm: `{recipe.compare.base}`",
            suggest(recipe.compare.base, arms),
        )
    for name in recipe.expect:
        if arms and name not in arms:
            yield document.fault(("expect", name), f"`expect` names no arm: `{name}`", suggest(name, arms))
    if recipe.compare:
        yield from _compare_faults(document, recipe.compare, arms)
    if recipe.refine:
        if recipe.compare is None or recipe.compare.aa or len(arms) != 2:
            yield document.fault(("refine",), "`refine` needs `compare` and exactly two arms")
        if not recipe.sweep.concurrency or len(recipe.sweep.concurrency) < 3:
            yield document.fault(("refine",), "`refine` needs a grid of at least three concurrencies in `sweep`")
    lengths = {path: len(values) for path, values in recipe.zip.items()}
    if len(set(lengths.values())) > 1:
        yield document.fault(("zip",), f"`zip` lists differ in length: {lengths}")
    for section in ("matrix", "zip"):
        for path in getattr(recipe, section):
            if path.split(".")[0] not in ARM_KEYS:
                yield document.fault((section, path), f"`{section}` cannot vary `{path}`", suggest(path, ARM_KEYS))
    yield from _timeout_faults(document, recipe)


def _compare_faults(document: Document, compare: Compare, arms: list[str]) -> Iterator[Fault]:
    named = [("promise", name) for pair in compare.promise.items() for name in pair]
    named += [("factors", arm) for levels in compare.factors.values() for names in levels.values() for arm in names]
    for section, name in named:
        if arms and name not in arms:
            yield document.fault(
                ("compare", section), f"`compare.{section}` names no arm: `{name}`", suggest(name, arms)
            )
    corners = corners_of(compare.factors)
    if compare.factors and (len(compare.factors) != 2 or corners is None):
        message = "`compare.factors` needs two factors of two levels each, with exactly one arm where they meet"
        yield document.fault(("compare", "factors"), message)


def corners_of(factors: Mapping[str, Mapping[str, list[str]]]) -> dict[tuple[str, str], str] | None:
    """The arm at each pair of levels of two factors; None where there is not exactly one."""
    if len(factors) != 2 or any(len(levels) != 2 for levels in factors.values()):
        return None
    first, second = factors.values()
    corners = {}
    for one, those in first.items():
        for other, these in second.items():
            shared = [arm for arm in those if arm in these]
            if len(shared) != 1:
                return None
            corners[one, other] = shared[0]
    return corners


def _grid_faults(document: Document, recipe: Recipe) -> Iterator[Fault]:
    """Faults of `matrix` and `zip` that leave no arms to look at."""
    paths = [*recipe.matrix, *recipe.zip]
    for section in ("matrix", "zip"):
        for path in getattr(recipe, section):
            clash = [other for other in paths if other.startswith(f"{path}.") or paths.count(path) > 1]
            if clash:
                yield document.fault((section, path), f"`{path}` is varied twice: it holds `{clash[0]}`")
    if not list(_points(recipe)):
        yield document.fault(("exclude",), "`exclude` leaves no combination")


def _timeout_faults(document: Document, recipe: Recipe) -> Iterator[Fault]:
    """request < level < run, start < run: a deadline longer than the one that holds it can never fire."""
    times = recipe.timeouts
    for inner, outer in (("request_s", "level_s"), ("level_s", "run_s"), ("start_s", "run_s"), ("request_s", "run_s")):
        short, long = getattr(times, inner), getattr(times, outer)
        if short is not None and long is not None and short >= long:
            yield document.fault(
                ("timeouts", inner), f"`timeouts.{inner}` ({short:g} s) must be shorter than `{outer}` ({long:g} s)"
            )
