"""Records: what a run found, small enough to commit, so that documents can be checked without its requests.

A record is a run folder without what is large or says where a machine keeps things: plan, state, machine facts, what
each launch said of itself, every level's result, the answer. `harness show`, `compare` and `verify` read it as a run.
Of each file left out it keeps the sha256 (`record.json`), so that a run and its record can be told to belong together.
The plan is kept whole, or its digest and those of its cells could not be derived again; one that would tell a secret or
a home directory is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.files import sha256_file, write_atomic
from harness.publish.blocks import Result
from harness.recipe.plan import Plan
from harness.recipe.secrets import holds_secret, looks_secret, tells_secret
from harness.run import ledger
from harness.run.store import Run, open_run
from harness.run.verify import has_requests, verify

FORMAT = "harness.record/1"
FOLDER = Path("docs") / "records"
# What a launch keeps: the software, how it came up, and what it said of its configuration. Not where things lie.
_LAUNCH = (
    "format", "launch", "arm", "block", "started_at", "env", "env_id", "python", "drift", "engine", "simulated",
    "ready_s", "milestones", "effective", "reused_from", "failed",
)  # fmt: skip
_STATE = ("format", "state", "at", "recipe", "plan", "started", "ended", "troubles", "error", "reproduces")
_FACTS = ("format", "at", "harness", "python", "system", "cpu", "memory", "limits", "gpu", "git")
_OF_A_GPU = frozenset({"uuid", "serial", "users", "pci_bus_id"})
_HOME = re.compile(r"(?<![\w.-])/(home/[^/\s]+|Users/[^/\s]+|root)(/|$)")
_PATH = re.compile(r"(?<![\w.:/-])/(?:[^\s/'\"`,;:()\[\]]+/)+")  # an absolute path up to its last part


def keep(run: Run, folder: Path) -> Path:
    """Write a run's record into a folder of records; an earlier one of the same run is replaced.

    Args:
        run: with its requests, so that the answer can be made from them; a record of a record is refused.
        folder: such as `docs/records`.

    Returns:
        The record's own folder, named as the run.

    Raises:
        InputError: the run's requests are not here, it no longer is what was measured, its plan may not be shown, or
            the folder cannot be written.
    """
    check(run.plan())
    if not has_requests(run):
        raise InputError(f"`{run.path}` has no requests", hint="a record is made from the run itself")
    if (found := verify(run)).differences:
        raise InputError(
            f"`{run.path}` is not as it was measured, and a record vouches for it",
            details=[str(one) for one in found.differences],
            hint="`harness verify RUN` says the same; publish a copy that nobody changed, or measure again",
        )
    result, target = Result.of(run), folder / run.run_id
    _clear(target)
    _write(target / "plan.json", json.loads((run.path / "plan.json").read_text()))
    _write(target / "run.json", _placeless(_only(run.state(), _STATE)))
    if before := run.facts().get("before"):
        _write(target / "facts.json", {"before": _machine(before)})
    for launch in result.plan.launches:
        if said := run.launch(launch.name):
            _write(target / "launches" / launch.name / "launch.json", _placeless(_only(said, _LAUNCH)))
    for launch_name, level in run.levels():
        place = target / "launches" / launch_name / "levels" / str(level.level["name"]) / "level.json"
        _write(place, level.model_dump(mode="json"))
    if result.answer is not None:
        _write(target / "comparison.json", result.answer.model_dump(mode="json"))
    said = {"format": FORMAT, "run": run.run_id, "digests": ledger.NAME, "left_out": dict(_left_out(run))}
    _write(target / "record.json", said)
    (target / ledger.NAME).unlink(missing_ok=True)
    ledger.note(target, sorted(target.rglob("*.json")))
    (target / ledger.NAME).chmod(0o644)
    return target


def check(plan: Plan) -> None:
    """Whether a plan may lie in a repository as it is.

    Raises:
        InputError: it holds a secret or a path below a home directory; says where, and never the value.
    """
    if found := list(dict.fromkeys(_revealing(plan))):
        raise InputError(
            "no record can be made of this plan: records are committed, and keep their plan whole",
            details=found,
            hint="name secrets in `server.secrets`, the recipe by a path from the project, and folders by variables of "
            "the site file, `${MODELS}/...`",
        )


def _revealing(plan: Plan) -> Iterator[str]:
    """What a plan would tell, by its place."""
    for arm in plan.arms.values():
        for section, values in (("args", arm.args), ("variables", arm.variables)):
            for name, value in values.items():
                if holds_secret(name, value):
                    yield f"`arms.{arm.name}.{section}.{name}` holds a secret"
        if tells_secret(arm.unchecked):
            yield f"`arms.{arm.name}.unchecked` holds a secret"
    home = f"{Path.home()}/"
    # Launches repeat what their arms say.
    for place, text in _texts(plan.model_dump(mode="json", exclude={"launches"}), ""):
        if looks_secret(text):
            yield f"`{place}` holds a secret"
        if _HOME.search(text) or (home != "//" and home in text):
            yield f"`{place}` holds a path below a home directory"


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text of some JSON with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, place)


def find(run_id: str, folders: Sequence[Path]) -> Run | None:
    """A run by its name: the first folder that has it, None where none does."""
    return next((open_run(folder / run_id) for folder in folders if (folder / run_id / "plan.json").is_file()), None)


def _clear(target: Path) -> None:
    """Remove an earlier record of the run, and only that."""
    if not target.exists():
        return
    if not (target / "record.json").is_file():
        raise InputError(f"`{target}` is there and is no record", hint="name another folder with `--record`")
    for path in sorted(target.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _only(value: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a machine is, without its name and without the names of its parts."""
    kept = _only(facts, _FACTS)
    if isinstance(gpu := kept.get("gpu"), Mapping):
        devices = [{name: value for name, value in one.items() if name not in _OF_A_GPU} for one in gpu["devices"]]
        kept["gpu"] = {**gpu, "devices": devices}
    return kept


def _placeless(value: Any) -> Any:
    """JSON without absolute paths: of each, only its last part is left."""
    if isinstance(value, str):
        return _PATH.sub("", value)
    if isinstance(value, Mapping):
        return {name: _placeless(item) for name, item in value.items()}
    return [_placeless(item) for item in value] if isinstance(value, list) else value


def _left_out(run: Run) -> list[tuple[str, str]]:
    """Requests and logs by path, with their sha256."""
    kept = {"requests.jsonl", "server_metrics.jsonl", "gpu.jsonl", "server.log"}
    paths = sorted(path for path in (run.path / "launches").rglob("*") if path.name in kept)
    return [(path.relative_to(run.path).as_posix(), sha256_file(path)) for path in paths]


def _write(path: Path, value: Any) -> None:
    """One compact file: records are read by programs, and lie in a repository for good."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    write_atomic(path, text + "\n")
