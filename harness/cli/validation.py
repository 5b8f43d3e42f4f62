"""Verb: validate. Whether an environment is fit to be used: from its files alone, or by asking the GPU."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, Verbs, common
from harness.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from harness.env.audit import Report, Source
    from harness.env.audit.report import AbiRow, ArchRow, Check
    from harness.env.build import Built
    from harness.env.lock import Lock
    from harness.env.validate import Report as GpuReport

_COLOURS = {"ok": "green", "note": "cyan", "cannot tell": "yellow", "not run": "dim"}  # everything else is red


def register(verbs: Verbs) -> None:
    """Add this room's verb."""
    verb = common(verbs.add_parser("validate", help="say whether an environment is fit: by its files, or on the GPU"))
    verb.add_argument("specs", nargs="+", metavar="SPEC", help="name or path of a spec; with --static also wheel files")
    how = verb.add_mutually_exclusive_group(required=True)
    how.add_argument("--static", action="store_true", help="audit the files: needs no GPU and imports nothing")
    how.add_argument("--gpu", action="store_true", help="run the checks that need a GPU, in the built environment")
    how.add_argument("--imports", action="store_true", help="import what the spec names, in the built environment")
    verb.add_argument("--check", action="append", default=[], metavar="NAME", help="only this check (repeatable)")
    verb.add_argument(
        "--arch", action="append", default=[], metavar="sm_NNN", help="instead of the spec's (repeatable)"
    )
    verb.add_argument("--fetch", action="store_true", help="with --static: get the binary wheels that are missing")
    verb.add_argument(
        "--wheels", action="store_true", help="with --static: the wheels, even if the environment is built"
    )
    verb.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="the folder of wheels (default: the project's own)"
    )
    verb.add_argument("--python", metavar="3.N", help="the Python version to look at, where the lock has several")
    verb.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="with --gpu: for every check, instead of its own"
    )
    verb.set_defaults(run=validate)


def validate(arguments: argparse.Namespace) -> int:
    """Answer for every spec that is named; 1 when any of them is not fit."""
    wheels = [name for name in arguments.specs if name.endswith(".whl")]
    if wheels and (len(wheels) < len(arguments.specs) or not arguments.static):
        raise InputError("wheel files are audited by themselves", hint="give wheel files alone, with `--static`")
    if wheels:
        return _static([_wheels_report(wheels, arguments)], arguments.talk)
    if arguments.static:
        return _static([_spec_report(name, arguments) for name in arguments.specs], arguments.talk)
    return _live([_live_report(name, arguments) for name in arguments.specs], arguments.talk)


# --- from files -----------------------------------------------------------------------------------------------------


def _wheels_report(names: Sequence[str], arguments: argparse.Namespace) -> "Report":
    from harness.env import audit
    from harness.env.audit import sources

    checks = [name for name in _checks(arguments, audit.CHECKS) if name != "versions"]
    source = sources.from_wheels([Path(name) for name in names])
    return audit.run(source, targets=_targets(arguments, ()), checks=checks, progress=_progress(arguments.talk, source))


def _spec_report(name: str, arguments: argparse.Namespace) -> "Report":
    from harness.env import audit, build, places
    from harness.env import lock as locks

    locked = locks.read_for(name)
    wanted = [check for check in audit.CHECKS if check in locked.wanted.checks] or list(audit.CHECKS)
    checks = _checks(arguments, wanted if not arguments.check else audit.CHECKS)
    targets = _targets(arguments, locked.wanted.cuda.arch if locked.wanted.cuda else ())
    built = None if arguments.wheels or arguments.fetch else build.find(locked)
    python = _python(locked, arguments.python, built)
    source = _source(name, locked, python, built, arguments)
    arguments.talk.line(
        f"{locked.name}: {len(source.distributions)} distributions"
        + (f" in {built.path}" if built else f" of {arguments.wheelhouse or places.wheelhouse()}")
        + (f", {len(source.absent)} not on hand" if source.absent else "")
    )
    return audit.run(
        source,
        targets=targets,
        checks=checks,
        known=_rules(checks),
        context=_context(locked, python, targets),
        progress=_progress(arguments.talk, source),
    )


def _source(name: str, locked: "Lock", python: str, built: "Built | None", arguments: argparse.Namespace) -> "Source":
    from harness.env import places
    from harness.env.audit import sources

    if built:
        return sources.from_environment(locked, built.site_packages)
    wheelhouse = arguments.wheelhouse or places.wheelhouse()
    if arguments.fetch:
        _fetch(name, locked, wheelhouse, python, arguments.talk)
    return sources.from_lock(locked, wheelhouse, python)


def _fetch(name: str, locked: "Lock", wheelhouse: Path, python: str, talk: Talk) -> None:
    """Get the binary wheels that the audit needs and the wheelhouse lacks."""
    from harness.cli.environments import showing_progress
    from harness.env import fetch, places, spec
    from harness.env.audit import sources

    needed = sources.needed(locked, python)
    part = locked.model_copy(update={"packages": needed})
    with showing_progress(talk) as progress:
        fetch.fetch(part, spec.load(places.spec_path(name)), wheelhouse, [python], progress)


def _python(locked: "Lock", asked: str | None, built: "Built | None") -> str:
    if built:
        return ".".join(built.python_version.split(".")[:2])
    if asked and asked not in locked.pythons:
        raise InputError(f"`--python {asked}`: `{locked.name}` is locked for {' '.join(locked.pythons)}")
    return asked or locked.pythons[-1]


def _checks(arguments: argparse.Namespace, known: "Sequence[Check]") -> "list[Check]":
    from harness.strict import suggest

    for name in arguments.check:
        if name not in known:
            raise InputError(f"there is no static check `{name}`", hint=suggest(name, known))
    return [name for name in known if not arguments.check or name in arguments.check]


def _targets(arguments: argparse.Namespace, given: Sequence[str]) -> tuple[str, ...]:
    from harness.env.audit import fatbin

    targets = tuple(arguments.arch or given)
    for target in targets:
        try:
            fatbin.device(target)
        except ValueError as error:
            raise InputError(f"`{target}` is no GPU architecture", hint="write it as `sm_120a`") from error
    return targets


def _rules(checks: "Sequence[Check]") -> Sequence[Any]:
    from harness.env import places, rules

    folder = places.specs_folder() / "rules"
    return rules.load_all(folder) if "versions" in checks and folder.is_dir() else ()


def _context(locked: "Lock", python: str, targets: Sequence[str]) -> Any:
    from harness.env import manifest, rules

    cuda = locked.wanted.cuda
    devel = "devel" in (locked.wanted.base_image or "")
    return rules.Context(
        packages=manifest.expected(locked, python),
        patches=[patch.name for patch in locked.patches],
        cuda=cuda.toolkit if cuda else None,
        # A `devel` image brings the toolkit's own compiler.
        nvcc=".".join(cuda.toolkit.split(".")[:2]) if cuda and devel else None,
        architectures=targets or None,
        variables=locked.wanted.variables,
    )


def _progress(talk: Talk, source: "Source") -> Any:
    total, seen = len(source.distributions), []

    def progress(name: str) -> None:
        seen.append(name)
        talk.detail(f"read {len(seen)} of {total}: {name}")

    return progress


def _static(reports: "Sequence[Report]", talk: Talk) -> int:
    from rich.console import Group

    shown = Group(*(part for report in reports for part in _static_tables(report)))
    values = [report.model_dump(mode="json") for report in reports]
    talk.data(values[0] if len(values) == 1 else values, shown)
    for report in reports:
        states = {check: report.state(check) for check in report.checks}
        talk.line(f"{report.environment}: " + ", ".join(f"{check} {state}" for check, state in states.items()))
    return 1 if any(report.failed for report in reports) else 0


def _static_tables(report: "Report") -> "list[RenderableType]":
    parts: list[RenderableType] = []
    if report.abi:
        parts.append(_abi_table(report.abi))
    if report.arch:
        parts.append(_arch_table(report.arch, report.architectures))
    return [*parts, _findings_table(report)]


def _abi_table(rows: "Sequence[AbiRow]") -> "RenderableType":
    table = _table(
        "ABI: symbols that PyTorch's libraries must export", "library", ">needed", ">missing", "built for torch"
    )
    for row in rows:
        missing = "not opened" if row.missing is None else str(len(row.missing))
        style = "red" if row.missing else ("yellow" if row.missing is None else "green")
        table.add_row(_where(row), str(row.imports), f"[{style}]{missing}[/]", row.built_for or "-")
    return table


def _arch_table(rows: "Sequence[ArchRow]", architectures: Sequence[str]) -> "RenderableType":
    table = _table("Device code", "library", ">units", *architectures, "targets")
    styles = {"native": "green", "by PTX": "cyan", "cannot tell": "yellow", "none": "red"}
    for row in rows:
        cells = []
        for name in architectures:
            coverage = row.coverage[name]
            share = "" if coverage.covered == row.units else f" ({coverage.covered})"
            cells.append(f"[{styles[coverage.verdict]}]{coverage.verdict}{share}[/]")
        table.add_row(_where(row), str(row.units), *cells, " ".join(row.targets))
    return table


def _where(row: "AbiRow | ArchRow") -> str:
    from rich.markup import escape

    return escape(f"{row.distribution} {row.version}\n  {row.path}")


def _findings_table(report: "Report") -> "RenderableType":
    table = _table(f"Findings: {report.environment}", "check", "state", "subject", "finding")
    for finding in report.findings:
        text = _text(finding.message, finding.remedy if finding.state != "ok" else None, finding.details)
        table.add_row(finding.check, _state(finding.state), *_escaped(finding.subject, text))
    return table


# --- on the GPU -----------------------------------------------------------------------------------------------------


def _live_report(name: str, arguments: argparse.Namespace) -> "GpuReport":
    from harness.env import build, manifest, validate
    from harness.env import lock as locks
    from harness.env.audit import fatbin

    locked = locks.read_for(name)
    built = build.find(locked)
    if built is None:
        raise InputError(f"the environment of `{locked.name}` is not built", hint=f"run `harness build {locked.name}`")
    targets = _targets(arguments, locked.wanted.cuda.arch if locked.wanted.cuda else ())
    unimported = _unimported(locked.name)
    for package, why in unimported.items():
        arguments.talk.line(f"not imported: {package}: {why}")
    named = {package.canonical_name for package in locked.wanted.packages} - unimported.keys()
    installed = set(manifest.expected(locked, _python(locked, None, built))) - unimported.keys()
    subject = validate.Subject(
        label=locked.name,
        env_id=locked.env_id,
        python=built.python,
        variables=built.variables,
        distributions=frozenset(named if arguments.imports else installed),
        devices=tuple(map(fatbin.device, targets)),
        driver_floor=locked.wanted.cuda.driver.lstrip("<>=~! ") if locked.wanted.cuda else None,
    )
    checks = (validate.IMPORTS,) if arguments.imports else validate.choose(arguments.check)
    return validate.run(subject, checks, deadline_s=arguments.deadline, progress=_result_line(arguments.talk))


def _unimported(name: str) -> dict[str, str]:
    """What a spec says need not be imported; empty where there is a lock alone, which says nothing of it."""
    from harness.env import places, spec

    try:
        path = places.spec_path(name)
    except InputError:
        return {}
    return spec.load(path).unimported


def _result_line(talk: Talk) -> Any:
    def progress(result: Any) -> None:
        talk.line(f"{result.check}: {result.state} ({result.seconds:.1f} s)")

    return progress


def _live(reports: "Sequence[GpuReport]", talk: Talk) -> int:
    from rich.console import Group

    values = [report.model_dump(mode="json") for report in reports]
    talk.data(values[0] if len(values) == 1 else values, Group(*map(_live_table, reports)))
    if not all(report.gpu for report in reports):
        talk.line("no GPU on this machine: run it where there is one; `harness validate --static` needs none")
    return 0 if all(report.passed for report in reports) else 1


def _live_table(report: "GpuReport") -> "RenderableType":
    table = _table(f"Checks: {report.environment}", "check", "state", ">seconds", "finding")
    for result in report.results:
        text = _text(result.message, result.remedy, result.evidence)
        table.add_row(result.check, _state(result.state), f"{result.seconds:.1f}", *_escaped(text))
    return table


# --- tables ---------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> "Table":
    """A table; a column whose title begins with `>` holds numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">"), justify=justify, overflow="fold")
    return table


def _text(message: str, remedy: str | None, details: Sequence[str]) -> str:
    lines = [message, *(f"  {detail}" for detail in details)]
    return "\n".join([*lines, f"fix: {remedy}"] if remedy else lines)


def _state(state: str) -> str:
    return f"[{_COLOURS.get(state, 'red')}]{state}[/]"


def _escaped(*texts: str) -> list[str]:
    from rich.markup import escape

    return [escape(text) for text in texts]
