"""Copies of everything people wrote that a run was made from, kept in its record, so that it can be made again.

    inputs/
      recipes/    the recipe, what it extends, and its prompt sets where they lie beside it or are small
      envspecs/   specs of its environments and what those extend, with locks/, patches/ and overlays/

The folder is laid out as a project is: `harness.env.places` can stand in it, and a build from it needs nothing else but
the wheels. Nothing here is looked at while measuring; a file that is too large, or not there any more, is left out.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from harness import strict
from harness.errors import HarnessError
from harness.files import sha256_file, write_atomic
from harness.load import prompts
from harness.recipe.plan import Plan
from harness.run.store import Run

FOLDER = "inputs"
_PRIVATE = 0o600
_LARGEST = 4 << 20  # bytes of a prompt set that is worth a copy in every record


def keep(run: Run, plan: Plan) -> None:
    """Copy a plan's inputs into its run; what is there already stays as it was when the run began."""
    folder = run.path / FOLDER
    if folder.exists():
        return
    begun = run.path / f".{FOLDER}"  # whole or not at all, also when the harness is killed here
    begun.mkdir(mode=0o700, exist_ok=True)
    _keep_recipe(plan, begun / "recipes")
    for name in sorted({arm.env for arm in plan.arms.values() if arm.env}):
        _keep_environment(name, begun / "envspecs")
    begun.rename(folder)
    run.note(*sorted(path for path in folder.rglob("*") if path.is_file()))


def recipe(run: Run, plan: Plan) -> Path | None:
    """The copy of a run's recipe; None where there is none."""
    path = run.path / FOLDER / "recipes" / Path(plan.recipe_path).name
    return path if path.is_file() else None


def lock(run: Run, environment: str) -> Path | None:
    """The copy of an environment's lock; None where there is none."""
    path = run.path / FOLDER / "envspecs" / "locks" / f"{environment}.lock.toml"
    return path if path.is_file() else None


def prompts_as_planned(plan: Plan, beside: Path) -> bool:
    """Whether every prompt set of a plan, looked for beside a folder, is the one that was planned for."""
    asked = {(arm.workload["prompts"], arm.workload["prompts_sha256"]) for arm in plan.arms.values()}
    try:
        return all(prompts.load(name, beside=beside).sha256 == sha256 for name, sha256 in asked)
    except HarnessError:
        return False


def _keep_recipe(plan: Plan, target: Path) -> None:
    path = Path(plan.recipe_path)
    if not path.is_file() or sha256_file(path) != plan.recipe_sha256:
        return
    for source in _lineage(path):
        # Parents may lie in other folders; the copy keeps where they are from the recipe, as far as that is below it.
        _copy(source, target / _below(source, path.parent))
    for name in sorted({arm.workload["prompts"] for arm in plan.arms.values()}):
        if (found := _prompt_file(name, path.parent)) is not None:
            place = Path(name) if found.suffix == Path(name).suffix else Path("prompts") / found.name
            _copy(found, target / _below(target / place, target))


def _lineage(path: Path) -> Iterator[Path]:
    """A recipe and what it extends, which `expand` has read without a fault."""
    yield path
    base = strict.read(path).data.get("extends")
    if isinstance(base, str):
        yield from _lineage(path.parent / base)


def _below(path: Path, folder: Path) -> Path:
    """A file's place below a folder; only its name where it lies elsewhere."""
    relative = Path(os.path.relpath(path, folder))
    return Path(path.name) if relative.is_absolute() or ".." in relative.parts else relative


def _prompt_file(name: str, beside: Path) -> Path | None:
    """The file of a prompt set, where it has one that is small enough; sets that are made need none."""
    try:
        path = prompts.file_of(name, beside=beside)
    except HarnessError:
        return None
    return path if path is not None and path.stat().st_size <= _LARGEST else None


def _keep_environment(name: str, target: Path) -> None:
    """A spec with what it extends, its lock, and the patches and overlays that a build applies."""
    # A quarter of a second, which a sweep over a server that runs already need not wait for.
    from harness.env import places, spec  # noqa: PLC0415

    path = places.spec_path(name)
    _copy(places.lock_path(path), target / "locks" / f"{name}.lock.toml")
    try:
        wanted = spec.load(path)
    except HarnessError:  # its lock was enough to run it; without the spec it can only be found built
        return
    sources = [*spec.lineage(path), *(path.parent / "patches" / f"{patch}.patch" for patch in wanted.patches)]
    for overlay in wanted.overlays:
        sources += sorted((path.parent / "overlays" / overlay).rglob("*"))
    for source in sources:
        if "__pycache__" not in source.parts:
            _copy(source, target / source.relative_to(path.parent))


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        write_atomic(target, source.read_bytes(), mode=_PRIVATE)
