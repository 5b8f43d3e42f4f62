"""The noise floor of a machine: how far identical arms differ on it, kept from A/A runs for comparisons that need it.

One file for each hardware class, engine, environment and model, in the harness's own state: an A/A run of one engine or
model says nothing of another.
"""

from pathlib import Path

from harness.env import places
from harness.errors import InputError
from harness.files import digest, write_json
from harness.recipe.plan import PlannedArm
from harness.run.facts import hardware_class
from harness.run.store import Run, read_stored
from harness.stats.arms import Arm
from harness.stats.compare import Settings, noise_floor
from harness.stats.comparison import NoiseFloor


def keep(run: Run, base: Arm, again: Arm, settings: Settings) -> NoiseFloor | None:
    """Store what an A/A run found; None where it has no pair of launches."""
    found = noise_floor(base, again, run.run_id, settings)
    path = _path(run, run.plan().arms[base.name])
    if found is not None and path is not None:
        write_json(path, found.model_dump(mode="json"))
    return found


def known(run: Run, arm: PlannedArm) -> NoiseFloor | None:
    """The noise floor where a run was measured, for such a server; None where no A/A run has told it."""
    path = _path(run, arm)
    return read_stored(NoiseFloor, path) if path is not None and path.is_file() else None


def _path(run: Run, arm: PlannedArm) -> Path | None:
    """Where it lies; None outside a project, which has no state of its own."""
    try:
        home = places.home()
    except InputError:
        return None
    facts = run.facts().get("before", {})
    model = arm.model.model_dump(exclude={"facts"}) if arm.model else None
    key = digest([hardware_class(facts), arm.engine, arm.env_id, model])
    return home / "noise" / f"{key[:16]}.json"
