"""Verb: verify. Does what a run stores still follow from what was measured?"""

import argparse
from pathlib import Path

from harness.cli.talk import Verbs, common, safe
from harness.errors import AnswerIsNo


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    verify = common(
        verbs.add_parser(
            "verify",
            help="derive every stored number and digest of a run again",
            description="Derive everything again that a run stores: each level's metrics, window, throughput, goodput "
            "and verdict from its requests, the comparison from the levels, and every digest from its file. Works on "
            "runs that were killed, and says what could not be checked. Exit code 1 when something differs.",
        )
    )
    verify.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    verify.set_defaults(run=verify_runs)


def verify_runs(arguments: argparse.Namespace) -> int:
    """`harness verify`: 0 when everything comes out as stored."""
    from harness.run import store, verify

    found = [verify.verify(store.open_run(path)) for path in arguments.runs]
    data = [one.to_json() for one in found]
    shown = "\n".join(safe(line) for one in found for line in verify.shown(one))
    arguments.talk.data(data if len(data) > 1 else data[0], shown)
    return AnswerIsNo.exit_code if any(one.differences for one in found) else 0
