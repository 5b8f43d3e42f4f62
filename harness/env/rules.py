"""Facts about versions, flags and hardware as data, and which of them bear on what is about to run.

A rule file (`envspecs/rules/*.yaml`) maps ids to rules: when it holds, how bad it is, what it means, where it was seen,
what to do. Evaluation is pure and has three answers: it fires, it does not, or it cannot be told because a fact is not
known, which is never taken for "fine".
"""

import ast
import fnmatch
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field, field_validator, model_validator

from harness.errors import Fault, InputError, Location
from harness.strict import Document, Strict, parse, read

Severity = Literal["error", "wrong answers", "no-op", "slow", "warning"]
SEVERITIES: tuple[Severity, ...] = ("error", "wrong answers", "no-op", "slow", "warning")

Scalar = bool | int | float | str

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True, slots=True)
class Context:
    """What is known about what is about to run. None means not known, in every field.

    Attributes:
        packages: installed versions by distribution name, all of them: what is not in it is not installed.
        patches: names of the patches applied.
        cuda: toolkit version, such as `13.0.1`; `absent` where it is known that there is none, as in the next two.
        nvcc: compiler release, such as `13.0`.
        driver: NVIDIA driver version, such as `580.95.05`.
        architectures: GPU targets as in a spec, such as `sm_120a`.
        topology: how the GPUs reach each other.
        engine: the engine's name.
        args: server flags without dashes, as in a recipe; None or False in it is a flag that is not given.
        variables: environment variables of the server.
        model: the model's name or family, such as `kimi-k2.5-int4`.
    """

    packages: Mapping[str, str] | None = None
    patches: Sequence[str] | None = None
    cuda: str | None = None
    nvcc: str | None = None
    driver: str | None = None
    architectures: Sequence[str] | None = None
    topology: Literal["pcie", "nvlink"] | None = None
    engine: str | None = None
    args: Mapping[str, Any] | None = None
    variables: Mapping[str, str] | None = None
    model: str | None = None


class Must(Strict):
    """What a flag or variable must be like; every given part must hold. Numbers compare with numbers only."""

    given: bool | None = None
    one_of: tuple[Scalar, ...] = ()
    not_one_of: tuple[Scalar, ...] = ()
    like: str | None = None
    above: float | None = None
    below: float | None = None
    at_least: float | None = None
    at_most: float | None = None


class When(Strict):
    """Conditions that must all hold.

    Attributes:
        packages: version specifier by distribution, or `installed` / `absent`.
        local: pattern for the local part of a version (`cu130` in `2.9.1+cu130`), by distribution; "" is none.
        differ: distributions whose installed versions (without local part) are not all the same.
        without_patches: patterns; none of the patches applied matches.
        cuda, nvcc, driver: version specifiers, or `absent`.
        architectures: patterns, one of which one architecture matches.
        topology, engine: as in `Context`.
        args: by flag (`tp|tp-size` for a flag of several names): a value, or a `Must`.
        formula: a comparison over flags, dashes as underscores; it does not hold where a flag in it is not given.
        variables: like `args`.
        model: patterns for the model's name.
        any: at least one of these holds.
        none: none of these holds.
    """

    packages: dict[str, str] = Field(default_factory=dict)
    local: dict[str, str] = Field(default_factory=dict)
    differ: tuple[str, ...] = ()
    without_patches: tuple[str, ...] = ()
    cuda: str | None = None
    nvcc: str | None = None
    driver: str | None = None
    architectures: tuple[str, ...] = ()
    topology: Literal["pcie", "nvlink"] | None = None
    engine: str | None = None
    args: dict[str, Scalar | Must] = Field(default_factory=dict)
    formula: str | None = None
    variables: dict[str, Scalar | Must] = Field(default_factory=dict)
    model: tuple[str, ...] = ()
    any: tuple["When", ...] = ()
    none: tuple["When", ...] = ()

    @field_validator("packages")
    @classmethod
    def _specifiers_read(cls, value: dict[str, str]) -> dict[str, str]:
        for name, wanted in value.items():
            if wanted not in ("installed", "absent"):
                _specifier(wanted, f"{name}: ")
        return {canonicalize_name(name): wanted for name, wanted in value.items()}

    @field_validator("cuda", "nvcc", "driver")
    @classmethod
    def _specifier_reads(cls, value: str | None) -> str | None:
        if value not in (None, "absent"):
            _specifier(value)
        return value

    @field_validator("formula")
    @classmethod
    def _formula_reads(cls, value: str | None) -> str | None:
        if value is not None:
            _check_formula(value)
        return value

    @model_validator(mode="after")
    def _not_empty(self) -> "When":
        if not self.model_fields_set:
            raise ValueError("a condition without conditions would always hold")
        return self


class _Entry(Strict):
    """One rule as it is written."""

    severity: Severity
    when: When
    message: str = Field(min_length=1)
    source: str = Field(min_length=1)
    remedy: str = Field(min_length=1)


class _File(Strict):
    rules: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class Rule:
    """One fact as data; `where` is the place it was written."""

    id: str
    severity: Severity
    when: When
    message: str
    source: str
    remedy: str
    where: Location | None = None

    @property
    def needs(self) -> frozenset[str]:
        """The kinds of facts (fields of `Context`) it asks for."""
        return frozenset(_needs(self.when))


@dataclass(frozen=True, slots=True)
class Fired:
    """A rule that holds (`fires`), or may hold (`cannot tell`: `missing` says which facts would settle it).

    `seen` are the facts that made it so, such as `sglang 0.5.9` or `--speculative-eagle-topk 4`.
    """

    rule: Rule
    verdict: Literal["fires", "cannot tell"]
    seen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    """True, False, or None for cannot tell; with what was seen and what was missing."""

    holds: bool | None
    seen: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


# --- reading --------------------------------------------------------------------------------------------------------


def load_all(folder: Path) -> tuple[Rule, ...]:
    """Every rule of a folder's `*.yaml`, by file name and then as written.

    Raises:
        InputError: the faults of all files at once; an id that two files use is one.
    """
    rules: dict[str, Rule] = {}
    faults: list[Fault] = []
    problems: list[str] = []
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError(f"no rules in `{folder}`", hint="rules are `*.yaml` files")
    for path in paths:
        try:
            found = load(path)
        except InputError as error:
            problems += error.details or (error.message,)
            continue
        for rule in found:
            if rule.id in rules:
                faults.append(Fault(f"rule `{rule.id}` is already at {rules[rule.id].where}", rule.where))
            rules[rule.id] = rule
    problems += [str(fault) for fault in faults]
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        raise InputError(f"{len(problems)} faults", details=problems)
    return tuple(rules.values())


def load(path: Path) -> tuple[Rule, ...]:
    """The rules of one file.

    Raises:
        InputError: every fault at once, with line and column.
    """
    return _rules(read(path))


def _rules(document: Document) -> tuple[Rule, ...]:
    entries = parse(document, _File).rules
    faults = [
        document.fault(("rules", name), f"`{name}` is no rule id", "lower-case words joined by dashes")
        for name in entries
        if not _is_id(name)
    ]
    if faults:
        raise InputError.of(faults)
    return tuple(
        Rule(
            id=name,
            severity=entry.severity,
            when=entry.when,
            message=_flowed(entry.message),
            source=_flowed(entry.source),
            remedy=_flowed(entry.remedy),
            where=document.locate(("rules", name)),
        )
        for name, entry in entries.items()
    )


# --- evaluating -----------------------------------------------------------------------------------------------------


def fire(rules: Sequence[Rule], context: Context) -> list[Fired]:
    """The rules that hold in a context, and those that cannot be told, worst first."""
    fired = []
    for rule in rules:
        answer = _all(_conditions(rule.when, context))
        if answer.holds:
            fired.append(Fired(rule, "fires", _once(answer.seen)))
        elif answer.holds is None:
            fired.append(Fired(rule, "cannot tell", _once(answer.seen), _once(answer.missing)))
    return sorted(fired, key=lambda item: (item.verdict == "cannot tell", SEVERITIES.index(item.rule.severity)))


def about(rules: Sequence[Rule], facts: frozenset[str]) -> tuple[Rule, ...]:
    """The rules that ask for no other facts than these: an environment alone knows nothing of flags."""
    return tuple(rule for rule in rules if rule.needs <= facts)


def _conditions(when: When, context: Context) -> Iterator[_Answer]:
    yield from _of_software(when, context)
    yield from _of_machine(when, context)
    yield from _of_launch(when, context)
    if when.any:
        yield _any([_all(_conditions(part, context)) for part in when.any])
    for part in when.none:
        yield _not(_all(_conditions(part, context)))


def _of_software(when: When, context: Context) -> Iterator[_Answer]:
    for name, wanted in when.packages.items():
        yield _package(name, wanted, context)
    for name, pattern in when.local.items():
        yield _local(canonicalize_name(name), pattern, context)
    if when.differ:
        yield _differ(when.differ, context)
    if when.without_patches:
        yield _without_patches(when.without_patches, context)


def _of_machine(when: When, context: Context) -> Iterator[_Answer]:
    for label in ("cuda", "nvcc", "driver"):
        if (wanted := getattr(when, label)) is not None:
            yield _version(label, wanted, getattr(context, label))
    if when.architectures:
        yield _architectures(when.architectures, context.architectures)
    if when.topology is not None:
        yield _same("topology", when.topology, context.topology)


def _of_launch(when: When, context: Context) -> Iterator[_Answer]:
    if when.engine is not None:
        yield _same("engine", when.engine, context.engine)
    if when.model:
        yield _model(when.model, context.model)
    for flag, must in when.args.items():
        yield _arg(flag, must, context)
    if when.formula is not None:
        yield _formula(when.formula, context)
    for name, must in when.variables.items():
        yield _variable(name, must, context)


def _all(answers: Iterator[_Answer]) -> _Answer:
    found = list(answers)
    if any(answer.holds is False for answer in found):
        return _Answer(False)
    return _joined(True if all(answer.holds for answer in found) else None, found)


def _any(found: Sequence[_Answer]) -> _Answer:
    holding = [answer for answer in found if answer.holds]
    if holding:
        return _joined(True, holding)
    unknown = [answer for answer in found if answer.holds is None]
    return _joined(None, unknown) if unknown else _Answer(False)


def _not(answer: _Answer) -> _Answer:
    return _Answer(None if answer.holds is None else not answer.holds, (), answer.missing)


def _joined(holds: bool | None, answers: Sequence[_Answer]) -> _Answer:
    return _Answer(
        holds,
        tuple(seen for answer in answers for seen in answer.seen),
        tuple(missing for answer in answers for missing in answer.missing),
    )


def _package(name: str, wanted: str, context: Context) -> _Answer:
    if context.packages is None:
        return _unknown("packages")
    version = _installed(context.packages).get(name)
    if wanted == "absent":
        return _Answer(version is None, (f"no {name}",))
    if version is None:
        return _Answer(False)
    if wanted == "installed":
        return _Answer(True, (f"{name} {version}",))
    return _version(name, wanted, version)


def _local(name: str, pattern: str, context: Context) -> _Answer:
    if context.packages is None:
        return _unknown("packages")
    version = _installed(context.packages).get(name)
    if version is None:
        return _Answer(False)
    try:
        local = Version(version).local or ""
    except InvalidVersion:
        return _unknown(f"a version of {name} that can be read, got `{version}`")
    return _Answer(fnmatch.fnmatchcase(local, pattern), (f"{name} {version}",))


def _differ(names: Sequence[str], context: Context) -> _Answer:
    if context.packages is None:
        return _unknown("packages")
    installed = _installed(context.packages)
    found = {name: installed[name] for name in map(canonicalize_name, names) if name in installed}
    try:
        public = {Version(version).public for version in found.values()}
    except InvalidVersion as error:
        return _unknown(f"versions that can be read ({error})")
    return _Answer(len(public) > 1, tuple(f"{name} {version}" for name, version in found.items()))


def _without_patches(patterns: Sequence[str], context: Context) -> _Answer:
    if context.patches is None:
        return _unknown("patches")
    there = [name for name in context.patches if _matches(name, patterns)]
    return _Answer(not there, (f"no patch {' or '.join(patterns)}",))


def _version(label: str, wanted: str, seen: str | None) -> _Answer:
    if seen is None:
        return _unknown(label)
    if "absent" in (wanted, seen):
        return _Answer(wanted == seen, (f"{label} {seen}",))
    try:
        return _Answer(Version(seen) in _specifier(wanted), (f"{label} {seen}",))
    except InvalidVersion:
        return _unknown(f"a version of {label} that can be read, got `{seen}`")


def _architectures(patterns: Sequence[str], seen: Sequence[str] | None) -> _Answer:
    if seen is None:
        return _unknown("architectures")
    found = tuple(name for name in seen if _matches(name, patterns))
    return _Answer(bool(found), found)


def _same(label: str, wanted: str, seen: str | None) -> _Answer:
    return _unknown(label) if seen is None else _Answer(seen == wanted, (f"{label} {seen}",))


def _model(patterns: Sequence[str], seen: str | None) -> _Answer:
    return _unknown("model") if seen is None else _Answer(_matches(seen.lower(), patterns), (f"model {seen}",))


def _arg(flag: str, must: Scalar | Must, context: Context) -> _Answer:
    if context.args is None:
        return _unknown("args")
    names = flag.split("|")  # several names of one flag
    name = next((name for name in names if _given(context.args.get(name))), names[0])
    value = context.args.get(name)
    shown = f"--{name}" if value is True else f"--{name} {value}" if _given(value) else f"no --{name}"
    return _Answer(_passes(value, must), (shown,))


def _variable(name: str, must: Scalar | Must, context: Context) -> _Answer:
    if context.variables is None:
        return _unknown("variables")
    value = context.variables.get(name)
    return _Answer(_passes(value, must), (f"{name}={value}" if value is not None else f"no {name}",))


def _passes(value: Any, must: Scalar | Must) -> bool:
    """Whether a flag's or variable's value is as a rule wants it; a list passes when one of its items does."""
    if isinstance(value, list | tuple):
        return any(_passes(item, must) for item in value)
    if not isinstance(must, Must):
        return _given(value) and _text(value) == _text(must)
    if must.given is not None and must.given != _given(value):
        return False
    if not _given(value):
        return must.given is False
    number = _number(value)
    bounds: list[tuple[float | None, Callable[[float, float], bool]]] = [
        (must.above, operator.gt),
        (must.below, operator.lt),
        (must.at_least, operator.ge),
        (must.at_most, operator.le),
    ]
    return (
        (not must.one_of or _text(value) in map(_text, must.one_of))
        and _text(value) not in map(_text, must.not_one_of)
        and (must.like is None or fnmatch.fnmatchcase(_text(value), must.like.lower()))
        and all(bound is None or (number is not None and compare(number, bound)) for bound, compare in bounds)
    )


def _formula(text: str, context: Context) -> _Answer:
    if context.args is None:
        return _unknown("args")
    tree = ast.parse(text, mode="eval").body
    values: dict[str, float] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            number = _number(context.args.get(node.id.replace("_", "-")))
            if number is None:
                return _Answer(False)
            values[node.id] = number
    seen = tuple(f"--{name.replace('_', '-')} {value:g}" for name, value in values.items())
    return _Answer(bool(_computed(tree, values)), seen)


def _check_formula(text: str) -> None:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a formula: {error.msg}") from error
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        raise ValueError("a formula is one comparison")
    for node in ast.walk(tree):
        known = isinstance(node, ast.Compare | ast.BinOp | ast.Name | ast.expr_context) or type(node) in _OPERATORS
        if not known and not (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
            raise ValueError(f"a formula holds flags, numbers, + - * ** and one comparison, got `{text}`")


def _computed(node: ast.expr, values: Mapping[str, float]) -> Any:
    """The value of a formula's node; `_check_formula` let through no other kinds."""
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_computed(node.left, values), _computed(node.right, values))
    if isinstance(node, ast.Compare):
        return _OPERATORS[type(node.ops[0])](_computed(node.left, values), _computed(node.comparators[0], values))
    assert isinstance(node, ast.Constant)
    return node.value


def _needs(when: When) -> Iterator[str]:
    """The kinds of facts a condition asks for."""
    for name in (
        "packages",
        "cuda",
        "nvcc",
        "driver",
        "architectures",
        "topology",
        "engine",
        "args",
        "variables",
        "model",
    ):
        if getattr(when, name):
            yield name
    if when.local or when.differ:
        yield "packages"
    if when.without_patches:
        yield "patches"
    if when.formula:
        yield "args"
    for part in (*when.any, *when.none):
        yield from _needs(part)


def _installed(packages: Mapping[str, str]) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in packages.items()}


def _unknown(what: str) -> _Answer:
    return _Answer(None, (), (what,))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _text(value: Any) -> str:
    """Values as people mean them: `true`, `True` and True are one, so are 4 and "4"."""
    return str(value).lower()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _specifier(text: str | None, label: str = "") -> SpecifierSet:
    try:
        return SpecifierSet(text or "", prereleases=True)
    except InvalidSpecifier as error:
        raise ValueError(f"{label}`{text}` is no version specifier, such as `>=0.5.8,<0.5.13`") from error


def _is_id(name: str) -> bool:
    return all(word and word.replace(".", "").isalnum() and word == word.lower() for word in name.split("-"))


def _flowed(text: str) -> str:
    """Text as one paragraph: where a line breaks in the file means nothing."""
    return " ".join(text.split())


def _once(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
