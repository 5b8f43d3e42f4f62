"""Looking up what a plan needs to know: locks, prompt sets, model digests. Reads only what the recipe names."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.engines import get as engine_of
from harness.env import places
from harness.errors import Fault, InputError
from harness.files import sha256_file
from harness.load import prompts
from harness.recipe import secrets
from harness.recipe.expand import Arm, Expanded
from harness.recipe.identity import model_facts
from harness.recipe.plan import Found, PromptFacts
from harness.recipe.schema import ModelFile
from harness.recipe.site import Site
from harness.stats.level import MEASUREMENT


def gather(expanded: Expanded, site: Site) -> Found:
    """Look everything up.

    Raises:
        InputError: an engine, environment or prompt set that is not there, or a flag that the locked engine does not
            take; all of them at once, with their lines.
        LockError: a lock does not read. One that is not there leaves its `env_id` open: a plan can be read, not run.
    """
    environments: dict[str, str | None] = {}
    sets: dict[str, PromptFacts] = {}
    if faults := [fault for arm in expanded.arms for fault in _faults(arm, expanded.path, environments, sets)]:
        raise InputError.of(list(dict.fromkeys(faults)))
    models = {arm.name: facts for arm in expanded.arms if (facts := _model(arm.setup.model, arm.setup.env, site))}
    return Found(environments, sets, models, MEASUREMENT, sha256_file(expanded.path))


def faults(arms: Sequence[Arm], recipe: Path) -> list[Fault]:
    """What is wrong with the names that arms use, and secrets that they spell out."""
    return [fault for arm in arms for fault in _faults(arm, recipe, {}, {})]


def _faults(
    arm: Arm, recipe: Path, environments: dict[str, str | None], sets: dict[str, PromptFacts]
) -> Iterator[Fault]:
    yield from _engine_faults(arm)
    yield from secrets.faults(arm)
    yield from _look_up_environment(arm, environments)
    yield from _look_up_prompts(arm, recipe, sets)


def model_path(model: ModelFile, environment: str | None, site: Site) -> Path | None:
    """Where a model lies on this machine; None while the environment that carries it is not built."""
    if model.path is not None:
        return Path(site.expand(model.path)).expanduser()
    if environment is None or model.from_env is None:
        return None
    from harness.env import build, lock  # noqa: PLC0415 - a quarter of a second, for recipes without an environment

    built = build.find(lock.read(places.lock_path(environment)))
    return built.site_packages / model.from_env if built else None


def _model(model: ModelFile | None, environment: str | None, site: Site) -> Mapping[str, str | int | None]:
    """What identifies a model. One from an environment is identified by the environment's own hashes."""
    if model is None or model.path is None:
        return {}
    path = model_path(model, environment, site)
    return model_facts(path) if path else {}


def _engine_faults(arm: Arm) -> Iterator[Fault]:
    setup = arm.setup
    try:
        engine = engine_of(setup.server.engine)
    except InputError as error:
        yield Fault(error.message, arm.place("server", "engine"), error.hint)
        return
    if engine.needs_model and setup.model is None:
        yield Fault(f"engine `{engine.name}` needs a `model`", arm.place("server", "engine"))
    if engine.needs_environment and setup.env is None:
        yield Fault(f"engine `{engine.name}` needs an `env`", arm.place("server", "engine"))
    if (engine.name == "attach") != (setup.server.url is not None):
        yield Fault("`server.url` and engine `attach` go together", arm.place("server", "engine"))


def _look_up_environment(arm: Arm, found: dict[str, str | None]) -> Iterator[Fault]:
    name = arm.setup.env
    if name is None or name in found:
        return
    from harness.env import lock  # noqa: PLC0415 - as above

    try:
        path = places.lock_path(name)
    except InputError as error:
        yield Fault(error.message, arm.place("env"), error.hint)
        return
    found[name] = lock.read(path).env_id if path.is_file() else None


def _look_up_prompts(arm: Arm, recipe: Path, found: dict[str, PromptFacts]) -> Iterator[Fault]:
    name = arm.setup.workload.prompts
    if name in found:
        return
    try:
        loaded = prompts.load(name, beside=recipe.parent)
        found[name] = PromptFacts(loaded.sha256, len(loaded))
    except InputError as error:
        yield from error.faults or [Fault(error.message, arm.place("workload", "prompts"), error.hint)]
