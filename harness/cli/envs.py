"""Verb: envs. Every environment of the project that this machine can hold, built and audited."""

import argparse
import contextlib
import sys
from typing import Any

from harness.cli.talk import Verbs, common
from harness.errors import BuildError, LockError


def register(verbs: Verbs) -> None:
    """Add this room's verb."""
    verb = common(
        verbs.add_parser(
            "envs",
            help="build and audit every environment that this machine can hold; say why for the others",
            description="`harness build` and `harness validate --static` for every spec. Exit code 1 when one that "
            "this machine can hold could not be built, or is not fit.",
        )
    )
    verb.set_defaults(run=envs)


def envs(arguments: argparse.Namespace) -> int:
    """Build and audit them one after the other; their own answers become talk, and the answer is what came of each."""
    from harness.env import places

    rows = [_one(name, arguments.quiet) for name in places.spec_names()]
    width = max(len(row["spec"]) for row in rows)
    shown = [f"{row['spec']:<{width}}  {row['state']}" + (f": {row['why']}" if row["why"] else "") for row in rows]
    arguments.talk.data(rows, "\n".join(shown))
    return 1 if any(row["state"] in ("could not be built", "not fit") for row in rows) else 0


def _one(name: str, quiet: bool) -> dict[str, Any]:
    """What came of one spec, as `state`; `why` where this machine cannot hold it."""
    if why := _not_here(name):
        return {"spec": name, "state": "not for this machine", "why": why}
    more = ["--quiet"] if quiet else []
    if _verb("build", name, *more):
        return {"spec": name, "state": "could not be built", "why": "see above"}
    fit = _verb("validate", name, "--static", *more) == 0
    return {"spec": name, "state": "built and fit" if fit else "not fit", "why": None if fit else "see above"}


def _not_here(name: str) -> str | None:
    """Why this machine cannot hold an environment: it has no lock, or is for another kind of machine."""
    from harness.env import interpreter, places
    from harness.env import lock as locks

    if not places.lock_path(name).exists():
        return "it has no lock; `harness lock` says which index could not be reached"
    try:
        interpreter.check_platform(locks.read_for(name).wanted.platform)
    except (BuildError, LockError) as error:
        return error.message
    return None


def _verb(*words: str) -> int:
    """The exit code of another verb, whose answer goes where talk goes."""
    from harness.cli import main

    with contextlib.redirect_stdout(sys.stderr):
        return main(words)
