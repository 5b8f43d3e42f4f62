"""The edge: verbs, messages, exit codes. stdout is data, stderr is talk; errors are caught here, once.

Each module of this room registers its verbs with `register(verbs)`; a verb is a function of the parsed arguments that
returns an exit code. Verbs import what they need inside the function, so that `harness --help` starts at once.
"""

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from harness import __version__
from harness.cli import (
    bench,
    checking,
    cluster,
    environments,
    envs,
    experiments,
    image,
    interop,
    machine,
    patches,
    publishing,
    reports,
    results,
    starting,
    validation,
)
from harness.cli.talk import Talk, safe
from harness.errors import HarnessError, InputError

EXIT_CODES = """exit codes:
  0 done   1 the answer is no   2 the input is wrong   3 lock missing, stale or drifted   4 could not build
  5 server failed   6 ran, but the measurement is not valid   70 a bug in the harness   130 interrupted"""
_GARBAGE = 50_000  # objects made before Python looks for cycles: at its 700, a fifteenth of a start goes into looking
BUG = os.EX_SOFTWARE  # what Python itself would end with, 1, says that the answer is no


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    gc.set_threshold(_GARBAGE)
    _open_closed_streams()
    _outlive_readers()
    arguments = parser().parse_args(argv)
    talk = Talk.from_arguments(arguments)
    arguments.talk = talk
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # here, where a full disk can still be told
        return code
    except HarnessError as error:
        talk.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        talk.line("interrupted")
        return 130
    except OSError as error:
        if talk.verbose:
            _trace()
        if not error.filename:
            _discard_output()
        talk.error(_told(error))
        return InputError.exit_code
    except Exception:  # noqa: BLE001 - the last resort: whatever it is, it is no answer
        _trace()
        sys.stderr.write(f"error: this is a bug in harness {__version__}: report it with the lines above, please\n")
        return BUG


def _trace() -> None:
    """Where the present error came up, for whoever mends it."""
    import traceback

    sys.stderr.write(safe(traceback.format_exc()))


def _told(error: OSError) -> InputError:
    """The machine's refusal of a file (too long a name, no permission, a full disk) as a message."""
    what = f"`{str(error.filename)[:200]}`" if error.filename else "the output"
    return InputError(f"cannot use {what}: {error.strerror or error}", hint="-v shows where it came up")


def _discard_output() -> None:
    """Keep the interpreter from failing once more at its end, over what stdout still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Put the null device where a caller closed stdin, stdout or stderr: else a pipe of ours would take its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - as long as we live


class _Outliving(io.FileIO):
    """A stream whose reader may go away: what is written then goes nowhere, and the work goes on to its own end."""

    def write(self, data: Any, /) -> int:
        """As ever, and to the null device from the moment on when nobody reads."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(memoryview(data).cast("B"))


def _outlive_readers() -> None:
    """`harness run RECIPE | head` is no reason to end a run, nor `harness show | head` one to complain."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # what a caller put there is theirs
            raw = io.BufferedWriter(_Outliving(stream.fileno(), "wb", closefd=False))
            lines, through = stream.line_buffering, stream.write_through
            lasting = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=lines, write_through=through)
            setattr(sys, name, lasting)


class _Parser(argparse.ArgumentParser):
    """A parser that says what was probably meant, and what there is to choose from."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from harness.strict import suggest

            hint = suggest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"there is no `{value}`; {hint}")

    def error(self, message: str) -> NoReturn:
        """End with exit code 2; a missing word's choices are named."""
        absent = message.partition("required: ")[2].split(", ")
        known = [
            f"{action.metavar} is one of {', '.join(map(str, action.choices))}"
            for action in self._get_positional_actions()
            if isinstance(action.choices, tuple) and action.metavar in absent
        ]
        super().error("; ".join([message, *known]))


def parser() -> argparse.ArgumentParser:
    """Every verb with its options."""
    whole = _Parser(
        prog="harness",
        description="Declare an environment and an experiment in git; get numbers to be trusted, and their proof.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"harness {__version__}")
    verbs = whole.add_subparsers(title="verbs", metavar="VERB", required=True)
    for room in (
        environments,
        patches,
        validation,
        image,
        envs,
        experiments,
        cluster,
        results,
        publishing,
        reports,
        checking,
        interop,
        bench,
        machine,
        starting,
    ):
        room.register(verbs)
    return whole
