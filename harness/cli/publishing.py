"""Verb: publish. Results into documents, LOGBOOK.md and records; and whether documents still say what was measured."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.talk import Verbs, common
from harness.errors import AnswerIsNo

if TYPE_CHECKING:
    from harness.publish.targets import Checked


def register(verbs: Verbs) -> None:
    """Add this room's verb."""
    publish = common(
        verbs.add_parser(
            "publish",
            help="write a run's results into documents and LOGBOOK.md; check that documents are not stale",
            description="Fill the marked blocks that a run's recipe names, and add its entry to LOGBOOK.md. --check "
            "changes nothing: without RUN it holds every marked block of the project's Markdown files against the run "
            "or record that the block names, and exits 1 with a diff where one is stale.",
        )
    )
    publish.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders (default: the newest)")
    publish.add_argument("--check", action="store_true", help="change nothing; exit 1 and show the diff when stale")
    publish.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="only write each run's record, without its requests and small enough to commit, such as into docs/records",
    )
    publish.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs for --check (default: runs)"
    )
    publish.set_defaults(run=publish_runs)


def publish_runs(arguments: argparse.Namespace) -> int:
    """`harness publish`."""
    if arguments.record is not None:
        return _record(arguments)
    if arguments.check:
        return _check(arguments)
    from harness.cli.results import newest
    from harness.env import places
    from harness.publish import targets
    from harness.publish.blocks import Result
    from harness.run import reproduce, store

    root = places.project_root()
    for path in arguments.runs or [newest()]:
        run = store.open_run(path)
        reproduce.refuse_changed(run)  # before a document repeats it
        result = Result.of(run)
        for line in targets.publish(run, result.plan, result.answer, root):
            arguments.talk.line(line)
        if not result.plan.publish:
            arguments.talk.line(f"{run.run_id}: nothing to publish, its recipe names no document and no logbook")
    return 0


def _record(arguments: argparse.Namespace) -> int:
    from harness.cli.results import newest
    from harness.publish import records
    from harness.run import store

    kept = [records.keep(store.open_run(path), arguments.record) for path in arguments.runs or [newest()]]
    arguments.talk.data([str(path) for path in kept], "\n".join(str(path) for path in kept))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from harness.env import places
    from harness.publish import records, targets
    from harness.run import store, verify

    root = places.project_root()
    if arguments.runs:
        runs = [store.open_run(path) for path in arguments.runs]
        stale = [one for run in runs for one in targets.stale(run, root)]
        changed = [one.sentence for run in runs if (one := verify.verify(run)).differences]
        found = targets.Checked((), tuple(stale), (), tuple(changed))
    else:
        found = targets.check_documents(root, [arguments.out, root / "runs", root / records.FOLDER])
    data = {name: list(getattr(found, name)) for name in ("current", "stale", "lost", "changed")}
    arguments.talk.data(data, "\n".join([*found.stale, *found.lost, *_count(found)]))
    if found.changed:
        raise AnswerIsNo(
            "documents repeat runs that are not what was measured",
            details=found.changed,
            hint="`harness verify RUN` names what differs: take the run as it was from git or a copy, or measure again",
        )
    if found.stale:
        raise AnswerIsNo("documents are stale", hint="run `harness publish RUN` and commit what changed")
    if found.lost:
        raise AnswerIsNo(
            "documents name runs that are neither in `runs` nor in `docs/records`",
            details=found.lost,
            hint="commit the run's record: `harness publish RUN --record docs/records`",
        )
    return 0


def _count(found: "Checked") -> list[str]:
    return [f"blocks that say what their run says: {len(found.current)}"] if not found.stale else []
