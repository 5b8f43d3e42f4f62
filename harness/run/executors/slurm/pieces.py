"""Which launches of a plan go together in one job, and what that job needs.

Levels of one launch are never spread: side by side they would disturb each other. Launches may be: what a comparison
needs on the same machines stays in one piece, in the plan's order; everything else is a piece of its own.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from harness.errors import InputError
from harness.recipe.plan import Plan, PlannedArm, PlannedLaunch
from harness.recipe.site import Slurm
from harness.run import needs
from harness.strict import suggest

_LONGEST = 1000  # tasks of an array: slurm.conf(5) has MaxArraySize 1001, of which indices end one before


@dataclass(frozen=True, slots=True)
class Step:
    """Launches that one `srun` carries out, in order; `image` is what it runs in, None for the machine itself."""

    launches: tuple[str, ...]
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Launches of one job in the plan's order, the machines it needs, and GPUs on each."""

    steps: tuple[Step, ...]
    nodes: int
    gpus: int

    @property
    def launches(self) -> tuple[str, ...]:
        """Every launch, in order."""
        return tuple(name for step in self.steps for name in step.launches)


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that are asked for in the same words: one job, or an array of jobs with one piece each."""

    pieces: tuple[Piece, ...]

    @property
    def nodes(self) -> int:
        """Machines of each job."""
        return self.pieces[0].nodes

    @property
    def gpus(self) -> int:
        """GPUs on each machine."""
        return self.pieces[0].gpus


def divide(plan: Plan, todo: Collection[str], site: Slurm) -> tuple[Piece, ...]:
    """The launches that are still to be carried out, as pieces, in the plan's order.

    Args:
        plan: the plan.
        todo: names of its launches.
        site: for the images of environments.

    Raises:
        InputError: an environment has no image, where servers run in images.
    """
    wanted = set(todo)
    groups: dict[int, list[PlannedLaunch]] = {}
    for number, launch in enumerate(plan.launches):
        if launch.name in wanted:
            groups.setdefault(_together(plan, launch, number), []).append(launch)
    return tuple(_piece(plan, group, site) for group in groups.values())


def batches(pieces: Sequence[Piece]) -> tuple[Batch, ...]:
    """Pieces by what they ask for, so that a campaign is a few arrays rather than thousands of jobs.

    A piece of several steps has a script of its own. No array is longer than Slurm takes by default.
    """
    found: dict[tuple[object, ...], list[Piece]] = {}
    for index, piece in enumerate(pieces):
        alone = index if len(piece.steps) > 1 else -1
        found.setdefault((piece.nodes, piece.gpus, piece.steps[0].image, alone), []).append(piece)
    return tuple(
        Batch(tuple(same[first : first + _LONGEST]))
        for same in found.values()
        for first in range(0, len(same), _LONGEST)
    )


def nodes_of(plan: Plan, arm: PlannedArm) -> int:
    """Machines that a launch of an arm needs: its server's, and those that only offer load."""
    apart = plan.client.node == "separate"
    return arm.nodes + (plan.client.nodes if apart else max(0, plan.client.nodes - arm.nodes))


def _together(plan: Plan, launch: PlannedLaunch, number: int) -> int:
    """What a launch shares with those of its piece: all of the run, its block, or nothing but its own number."""
    same = plan.compare["same_nodes"] if plan.compare else False
    if same == "block":
        return launch.block
    return 0 if same else number


def _piece(plan: Plan, launches: Sequence[PlannedLaunch], site: Slurm) -> Piece:
    arms = [plan.arms[launch.arm] for launch in launches]
    gpus = max(-(-needs.gpus(arm) // arm.nodes) for arm in arms)
    return Piece(tuple(_steps(plan, launches, site)), max(nodes_of(plan, arm) for arm in arms), gpus)


def _steps(plan: Plan, launches: Sequence[PlannedLaunch], site: Slurm) -> Iterator[Step]:
    """Launches next to each other that run in the same image are one step."""
    for image, group in itertools.groupby(launches, lambda launch: image_of(plan.arms[launch.arm], site)):
        yield Step(tuple(launch.name for launch in group), image)


def image_of(arm: PlannedArm, site: Slurm) -> str | None:
    """The image an arm's server runs in, None for the machine itself.

    Raises:
        InputError: this site runs servers in images, and knows none for this arm's environment.
    """
    if site.container is None:
        return None
    images = site.container.images
    if arm.env is None or arm.env not in images:
        hint = suggest(arm.env, images) if arm.env else "an arm without an environment cannot run in a container"
        raise InputError(f"the site's `slurm.container.images` has none for `{arm.env or arm.name}`", hint=hint)
    return images[arm.env]
