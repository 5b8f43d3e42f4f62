"""From a recipe file to its plan; where something is wrong with the file, all of it is said at once."""

from collections.abc import Iterator
from pathlib import Path

from harness.errors import Fault, HarnessError, InputError
from harness.recipe import expand, findings, gather, plan
from harness.recipe.expand import Expanded
from harness.recipe.plan import Plan
from harness.recipe.site import Site


def decide(path: Path, site: Site) -> tuple[Expanded, Plan]:
    """A recipe worked out, and everything that it will run.

    Raises:
        InputError: what is wrong with the recipe, from its keys to its flags, in one list with lines and columns.
    """
    try:
        expanded = expand.load(path)
        found = gather.gather(expanded, site)
        return expanded, plan.make(expanded, found, findings.find(expanded))
    except InputError as error:
        if not error.faults:
            raise
        # The stage that stopped knows only its own faults; the later ones look at whatever reads all the same.
        raise InputError.of(list(dict.fromkeys([*error.faults, *_later(path)]))) from None


def _later(path: Path) -> Iterator[Fault]:
    """Faults of every stage, as far as each can judge a recipe that is not whole."""
    try:
        examined = expand.examine(path)
    except InputError:
        return
    yield from examined.faults
    yield from gather.faults(examined.arms, path)
    for arm in examined.arms:
        try:
            yield from findings.flag_faults(arm)
        except HarnessError:  # an environment or engine that is not there, which is a fault already
            continue
