"""A recipe file becomes arms: `extends` and `matrix` are worked out, each arm is laid over the recipe, all is checked.

Every value keeps the place it was written at, through inheritance, arm and matrix, so that a fault names that line.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import Fault, InputError, Location
from harness.recipe import grid
from harness.recipe.grid import Varied
from harness.recipe.schema import Compare, Grid, Recipe, Setup
from harness.strict import Document, M, Pointer, merge, parse, read, suggest

ARM_KEYS = ("env", "model", "server", "workload")
GRID_KEYS = ("matrix", "zip", "exclude")


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm, worked out to the end.

    `overrides` are the dotted paths in which it departs from the recipe; `written_as` is the recipe's own name for it,
    which all arms that a grid made of it share.
    """

    name: str
    setup: Setup
    document: Document
    overrides: tuple[str, ...]
    written_as: str

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

    def promised(self, arm: Arm) -> tuple[str, ...]:
        """Features that must prove to be engaged in an arm."""
        wanted = self.recipe.expect
        return tuple(dict.fromkeys([*wanted.get(arm.written_as, ()), *wanted.get(arm.name, ())]))


def load(path: Path) -> Expanded:
    """Read a recipe and work out its arms.

    Raises:
        InputError: all faults of the recipe at once, each with file, line and column.
    """
    read_so_far = examine(path)
    if read_so_far.faults or read_so_far.recipe is None:
        raise InputError.of(list(dict.fromkeys(read_so_far.faults)))
    return Expanded(path, read_so_far.recipe, read_so_far.document, read_so_far.arms)


@dataclass(frozen=True, slots=True)
class Examined:
    """As much of a recipe as can be read, and what is wrong with the rest; without a recipe there is no matrix."""

    document: Document
    recipe: Recipe | None
    arms: tuple[Arm, ...]
    faults: tuple[Fault, ...]


def examine(path: Path) -> Examined:
    """Read what can be read of a recipe.

    Raises:
        InputError: the file is no YAML mapping, or what it extends cannot be read.
    """
    document = _inherited(path, ())
    faults: list[Fault] = []
    recipe = _checked(document, Recipe, faults)
    if recipe is not None and (wrong := list(grid.faults(document, [Varied(recipe)], ARM_KEYS))):
        return Examined(document, None, (), tuple(wrong))
    arms: list[Arm] = []
    for written in _written(document, faults):
        for name, arm_document, overrides in _grown(document, recipe, written, faults):
            if (setup := _checked(arm_document, Setup, faults)) is not None:
                arms.append(Arm(name, setup, arm_document, overrides, written.name))
    if recipe is not None:
        faults += _reference_faults(document, recipe, arms)
    return Examined(document, recipe, tuple(arms), tuple(faults))


def _checked(document: Document, model: type[M], faults: list[Fault]) -> M | None:
    """A document as its model, its faults added; what is faulty is left out, None where it cannot be done without."""
    try:
        return parse(document, model)
    except InputError as error:
        faults += error.faults
        rest = document.without({fault.where for fault in error.faults})
    try:
        return parse(rest, model)
    except InputError:
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


@dataclass(frozen=True, slots=True)
class _Written:
    """An arm as the recipe writes it: laid over the recipe, the paths it sets, and a grid of its own if it has one."""

    name: str
    laid: Document
    overrides: tuple[str, ...]
    grid: Varied | None


def _written(document: Document, faults: list[Fault]) -> Iterator[_Written]:
    """Each arm of the recipe; one that names none has one, `only`."""
    base = _slice(document, (), {key: document.data[key] for key in ARM_KEYS if key in document.data})
    arms = document.data.get("arms") or {"only": {}}
    for name in arms if isinstance(arms, dict) else ():
        pointer: Pointer = ("arms", name)
        data = arms[name] if isinstance(arms[name], dict) else {}
        known = (*ARM_KEYS, *GRID_KEYS)
        wrong = [key for key in data if key not in known]
        faults += [document.fault((*pointer, key), f"an arm cannot set `{key}`", suggest(key, known)) for key in wrong]
        arm = _slice(document, pointer, {key: value for key, value in data.items() if key in ARM_KEYS})
        own = _slice(document, pointer, {key: value for key, value in data.items() if key in GRID_KEYS})
        varied = _checked(own, Grid, faults) if own.data else None
        yield _Written(
            name, merge(base, arm), tuple(sorted(_leaves(arm.data))), Varied(varied, pointer) if varied else None
        )


def _grown(
    document: Document, recipe: Recipe | None, arm: _Written, faults: list[Fault]
) -> Iterator[tuple[str, Document, tuple[str, ...]]]:
    """The arms that grids make of one: name, document, paths it sets. A recipe that is faulty has no grid yet."""
    if recipe is None:
        yield arm.name, arm.laid, arm.overrides
        return
    varied = [Varied(recipe)]
    if arm.grid is not None:
        varied.append(arm.grid)
        if wrong := list(grid.faults(document, varied, ARM_KEYS)):
            faults += wrong
            return
    for point in grid.points(varied):
        laid = merge(arm.laid, grid.document_of(document, point, varied)) if point else arm.laid
        yield arm.name + grid.suffix(point), laid, tuple(sorted({*arm.overrides, *point}))


def _slice(document: Document, pointer: Pointer, data: dict[str, Any]) -> Document:
    """The part of a document under `pointer` as a document of its own, places kept."""
    size = len(pointer)

    def below(places: Mapping[Pointer, Location], kept: Container[str | int]) -> dict[Pointer, Location]:
        within = {known[size:]: place for known, place in places.items() if known[:size] == pointer}
        return {known: place for known, place in within.items() if not known or known[0] in kept}

    places = below(document.places, data)
    places.setdefault((), document.locate(pointer) or Location(document.path, 1, 1))
    return Document(document.path, data, places, below(document.deleted, ARM_KEYS))


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _reference_faults(document: Document, recipe: Recipe, found: list[Arm]) -> Iterator[Fault]:
    """Names in the recipe that must name one of its arms; sections that must fit each other."""
    arms = [arm.name for arm in found]
    families = {*arms, *(arm.written_as for arm in found)}
    for name in sorted({name for name in arms if arms.count(name) > 1}):
        yield document.fault(("arms",), f"two arms are called `{name}`: their values differ, but not in writing")
    if recipe.compare and arms and recipe.compare.base not in arms:
        yield document.fault(
            ("compare", "base"),
            f"`compare.base` names no arm: `{recipe.compare.base}`",
            suggest(recipe.compare.base, arms),
        )
    for name in recipe.expect:
        if arms and name not in families:
            yield document.fault(("expect", name), f"`expect` names no arm: `{name}`", suggest(name, families))
    if recipe.compare:
        yield from _compare_faults(document, recipe.compare, arms)
    if recipe.refine:
        if recipe.compare is None or recipe.compare.aa or len(arms) != 2:
            yield document.fault(("refine",), "`refine` needs `compare` and exactly two arms")
        if not recipe.sweep.concurrency or len(recipe.sweep.concurrency) < 3:
            yield document.fault(("refine",), "`refine` needs a grid of at least three concurrencies in `sweep`")
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


def _timeout_faults(document: Document, recipe: Recipe) -> Iterator[Fault]:
    """request < level < run, start < run: a deadline longer than the one that holds it can never fire."""
    times = recipe.timeouts
    for inner, outer in (("request_s", "level_s"), ("level_s", "run_s"), ("start_s", "run_s"), ("request_s", "run_s")):
        short, long = getattr(times, inner), getattr(times, outer)
        if short is not None and long is not None and short >= long:
            yield document.fault(
                ("timeouts", inner), f"`timeouts.{inner}` ({short:g} s) must be shorter than `{outer}` ({long:g} s)"
            )
