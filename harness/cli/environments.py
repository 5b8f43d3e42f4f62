"""Verbs: lock, fetch, build."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.talk import Talk, Verbs, common
from harness.errors import InputError, LockError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from harness.env.lock import Lock
    from harness.env.spec import EnvSpec
    from harness.env.wheelhouse import Progress


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    _register_lock(verbs)
    _register_fetch(verbs)
    _register_build(verbs)


def _register_lock(verbs: Verbs) -> None:
    verb = common(verbs.add_parser("lock", help="resolve a spec to a lock, or check, or compare locks"))
    verb.add_argument(
        "specs", nargs="*", metavar="SPEC", help="name or path of a spec; with --check all of them if none"
    )
    verb.add_argument("--check", action="store_true", help="change nothing; exit 3 if a lock is missing or stale")
    verb.add_argument("--upgrade", action="append", default=[], metavar="PKG", help="let this pin move (repeatable)")
    verb.add_argument("--upgrade-all", action="store_true", help="let every pin move")
    verb.add_argument("--diff", nargs=2, metavar=("A", "B"), help="say how two locks differ (names or paths)")
    verb.set_defaults(run=lock)


def _register_fetch(verbs: Verbs) -> None:
    verb = common(verbs.add_parser("fetch", help="fill the wheelhouse from a lock, for building offline"))
    verb.add_argument("spec", metavar="SPEC", help="name or path of a spec")
    verb.add_argument("--python", metavar="3.N", help="only what this Python version needs")
    verb.add_argument("--wheelhouse", type=Path, metavar="DIR", help="the folder to fill (default: the project's own)")
    verb.set_defaults(run=fetch)


def _register_build(verbs: Verbs) -> None:
    verb = common(verbs.add_parser("build", help="build the environment of a lock"))
    verb.add_argument("spec", metavar="SPEC", help="name or path of a spec")
    verb.add_argument("--offline", action="store_true", help="take every file from the wheelhouse")
    verb.add_argument("--python", metavar="PYTHON", help="the interpreter to build with, a version or a path")
    verb.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="the folder of wheels (default: the project's own)"
    )
    verb.set_defaults(run=build)


def lock(arguments: argparse.Namespace) -> int:
    """Resolve specs to locks; or check them; or compare two locks."""
    if arguments.diff:
        return _diff(arguments.talk, *arguments.diff)
    if arguments.check:
        if arguments.upgrade or arguments.upgrade_all:
            raise InputError("`--check` changes nothing and `--upgrade` moves pins: give one of them")
        return _check(arguments.talk, arguments.specs)
    if not arguments.specs:
        raise InputError("which spec?", hint="name one or more, or use `--check` to check every lock")
    answers = [_lock_one(name, arguments) for name in arguments.specs]
    shown = [
        f"{answer['lock']}: {answer['packages']} packages, env_id {str(answer['env_id'])[:16]}" for answer in answers
    ]
    arguments.talk.data(answers, "\n".join(shown))
    return 0


def _lock_one(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    from packaging.utils import canonicalize_name

    from harness.env import lock as locks
    from harness.env import places, spec

    path = places.spec_path(name)
    wanted, target = spec.load(path), places.lock_path(path)
    old = _old_lock(target, arguments.talk)
    upgrade = locks.Upgrade(arguments.upgrade_all, tuple(canonicalize_name(name) for name in arguments.upgrade))
    _known_packages(upgrade.packages, old)
    current = old is not None and not upgrade.moves and not locks.check(wanted, old)
    new = old if current and old is not None else locks.make(wanted, old, upgrade)
    changes = locks.diff(old, new) if old is not None else []
    if not current:
        locks.write(target, new)
    for line in changes or (["unchanged"] if old is not None else []):
        arguments.talk.line(f"{wanted.env}: {line}")
    return {
        "spec": wanted.env,
        "lock": _near(target),
        "env_id": new.env_id,
        "packages": len(new.packages),
        "changes": changes,
    }


def _old_lock(path: Path, talk: Talk) -> "Lock | None":
    from harness.env import lock as locks

    if not path.exists():
        return None
    try:
        return locks.read(path)
    except LockError as error:
        talk.line(f"{error.message}; making it anew")
        return None


def _known_packages(names: tuple[str, ...], old: "Lock | None") -> None:
    from harness.strict import suggest

    known = {package.name for package in old.packages} if old else set()
    for name in names:
        if name not in known:
            raise InputError(f"`--upgrade {name}`: the lock holds no such package", hint=suggest(name, known))


def _check(talk: Talk, names: list[str]) -> int:
    from harness.env import lock as locks
    from harness.env import places, spec

    stale: dict[str, list[str]] = {}
    checked = names or [name for name in places.spec_names() if places.lock_path(name).exists()]
    for name in checked:
        path = places.spec_path(name)
        if differences := locks.check(spec.load(path), locks.read(places.lock_path(path))):
            stale[path.stem] = differences
    if stale:
        title = ", ".join(f"`{name}`" for name in stale)
        details = [f"{name}: {line}" for name, lines in stale.items() for line in lines]
        raise LockError(f"stale: the lock of {title}", details=details, hint=f"run `harness lock {' '.join(stale)}`")
    talk.data({"checked": checked, "stale": []}, "\n".join(f"{name}: the lock is current" for name in checked))
    return 0


def _diff(talk: Talk, before: str, after: str) -> int:
    from harness.env import lock as locks

    changes = locks.diff(_any_lock(before), _any_lock(after))
    talk.data({"before": before, "after": after, "changes": changes}, "\n".join(changes) or "no difference")
    return 0


def _any_lock(name: str) -> "Lock":
    from harness.env import lock as locks

    return locks.read(Path(name)) if name.endswith(".toml") else locks.read_for(name)


def fetch(arguments: argparse.Namespace) -> int:
    """Fill the wheelhouse from a lock."""
    from harness.env import fetch as fetching
    from harness.env import places

    wanted, locked = _spec_and_lock(arguments.spec)
    wheelhouse = arguments.wheelhouse or places.wheelhouse()
    if arguments.python and arguments.python not in locked.pythons:
        known = " ".join(locked.pythons)
        raise InputError(f"`--python {arguments.python}`: `{wanted.env}` is locked for {known}")
    with showing_progress(arguments.talk) as progress:
        paths = fetching.fetch(locked, wanted, wheelhouse, [arguments.python] if arguments.python else [], progress)
    size = sum(path.stat().st_size for path in paths)
    answer = {"wheelhouse": str(wheelhouse), "files": len(paths), "bytes": size, "env_id": locked.env_id}
    arguments.talk.data(answer, f"{_near(wheelhouse)}: {len(paths)} files, {size / 1e6:.1f} MB, all verified")
    return 0


def build(arguments: argparse.Namespace) -> int:
    """Build the environment of a lock, or say that it is there."""
    from harness.env import build as building

    wanted, locked = _spec_and_lock(arguments.spec)
    with showing_progress(arguments.talk) as progress:
        there = building.sound(locked, arguments.python)
        built = there or building.build(
            locked,
            wanted,
            offline=arguments.offline,
            python=arguments.python,
            wheelhouse=arguments.wheelhouse,
            progress=progress,
        )
    if there:
        arguments.talk.line("built before, nothing to do")
    lacking = building.lacking(built)
    answer = {
        "path": str(built.path),
        "python": str(built.python),
        "python_version": built.python_version,
        "env_id": built.env_id,
        "variables": dict(built.variables),
        "reused": there is not None,
        "lacking": lacking,
    }
    for name in lacking:
        arguments.talk.line(f"warning: this machine lacks `{name}`; what needs it will not load")
    arguments.talk.data(answer, f"{_near(built.path)}: Python {built.python_version}, env_id {built.env_id[:16]}")
    return 0


def _spec_and_lock(name: str) -> "tuple[EnvSpec, Lock]":
    from harness.env import lock as locks
    from harness.env import places, spec

    path = places.spec_path(name)
    wanted, locked = spec.load(path), locks.read(places.lock_path(path))
    if differences := locks.check(wanted, locked):
        raise LockError(f"the lock of `{wanted.env}` is stale", details=differences, hint=f"run `harness lock {name}`")
    return wanted, locked


def _near(path: Path) -> str:
    """A path as people write it: relative to here where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


@contextmanager
def showing_progress(talk: Talk) -> "Iterator[Progress]":
    """A progress bar on a terminal, lines elsewhere."""
    console = talk.console(stderr=True)
    if talk.quiet or not console.is_terminal:
        yield _Lines(talk)
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield _Bar(talk, bar)


class _Lines:
    """Progress as lines of talk."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def say(self, text: str) -> None:
        """One line."""
        self._talk.line(text)

    def expect(self, amount: int) -> None:
        """How much will come, if anything."""
        if amount:
            self._talk.line(f"{amount / 1e6:.1f} MB to fetch")

    def advance(self, amount: int) -> None:
        """Nothing: lines would be too many."""


class _Bar(_Lines):
    """Progress as a bar; rich's is safe to call from several threads."""

    def __init__(self, talk: Talk, bar: "Bar") -> None:
        super().__init__(talk)
        self._bar = bar
        self._task: TaskID | None = None

    def expect(self, amount: int) -> None:
        """A bar of that length, if there is anything to show."""
        if amount:
            self._task = self._bar.add_task("fetching", total=amount)

    def advance(self, amount: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.advance(self._task, amount)
