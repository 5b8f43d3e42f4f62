"""How the command line speaks: data to stdout, talk to stderr, colour only where it helps."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.files import escape_control

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Verbs = Any  # argparse's sub-parsers action, which typeshed keeps private


class Talk:
    """Where a verb prints.

    `quiet` drops talk but never errors; `as_json` makes `data` print JSON in place of what people read.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, as_json: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.as_json = as_json

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "Talk":
        """From the options every verb has."""
        return cls(
            quiet=getattr(arguments, "quiet", False),
            verbose=getattr(arguments, "verbose", False),
            as_json=getattr(arguments, "json", False),
        )

    def console(self, *, stderr: bool = False) -> "Console":
        """A rich console; without a terminal it is plain and as wide as COLUMNS says, else 120."""
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        width = None if stream.isatty() else _columns()
        return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)

    def data(self, value: Any, shown: "RenderableType | None" = None) -> None:
        """The verb's answer: JSON of `value` under --json, else `shown` (or the JSON, when there is nothing nicer)."""
        if self.as_json or shown is None:
            sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        elif isinstance(shown, str):
            sys.stdout.write(shown if shown.endswith("\n") else shown + "\n")
        else:
            self.console().print(shown, crop=False)  # a line that may not be folded runs on

    def line(self, text: str) -> None:
        """One line of talk."""
        if not self.quiet:
            sys.stderr.write(safe(text) + "\n")

    def detail(self, text: str) -> None:
        """One line of talk for -v."""
        if self.verbose:
            self.line(text)

    def error(self, error: HarnessError) -> None:
        """An error as people read it: what, where, what was seen, blank line, hint."""
        sys.stderr.write(f"error: {safe(str(error))}\n")


def safe(text: str) -> str:
    """Untrusted text without what a terminal would act on: control characters become their escapes."""
    return escape_control(text, keep="\t\n")


def _columns() -> int:
    """The width of output that is no terminal: COLUMNS where it is a number, else 120."""
    text = os.environ.get("COLUMNS", "")
    return max(20, int(text)) if text.isascii() and text.isdigit() else 120


def common(verb: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a verb the options every verb has."""
    verb.add_argument("--json", action="store_true", help="print the answer as JSON")
    verb.add_argument("-q", "--quiet", action="store_true", help="no talk on stderr, errors only")
    verb.add_argument("-v", "--verbose", action="store_true", help="more talk on stderr")
    return verb
