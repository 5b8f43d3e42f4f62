"""The few ways things can go wrong, named for what the user can do about them.

    HarnessError
     +- AnswerIsNo        1  the question was answered, and the answer is no
     +- InputError        2  a file or argument is wrong
     +- LockError         3  lock missing, stale, or the live environment drifted from it
     +- BuildError        4  an environment or image could not be built
     +- ServerError       5  a server failed
     +- MeasurementError  6  it ran, but the measurement is not valid
     +- Interrupted     130  the user said stop

Raised anywhere, caught once, in `cli`. A message reads: what, where, what was seen; then, after a blank line, the hint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FAULTS_SHOWN = 50  # more would push the first ones, which the rest may follow from, off the screen


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file people write; line and column count from 1."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in an input; a file's faults are reported all at once."""

    message: str
    where: Location | None = None
    hint: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.message}{hint}"


class HarnessError(Exception):
    """Anything the user should read as a message rather than a traceback.

    Args:
        message: what happened, where, and what was seen; literals in backticks, no full stop.
        hint: what to do next, if we know.
        details: evidence lines, shown indented under the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.details)]
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)


class AnswerIsNo(HarnessError):
    """The question was answered, and the answer is no (a regression, a failed validation, stale docs)."""

    exit_code = 1


class InputError(HarnessError):
    """A file, argument or site fact is wrong."""

    exit_code = 2
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, faults: Sequence[Fault], *, hint: str | None = None) -> "InputError":
        """All faults of one input as one error, which keeps them in `faults` and tells the first ones."""
        faults = sorted(faults, key=_position)
        if len(faults) == 1:
            fault = faults[0]
            error = cls(str(Fault(fault.message, fault.where)), hint=fault.hint or hint)
        else:
            shown = [str(fault) for fault in faults[:_FAULTS_SHOWN]]
            more = [f"and {len(faults) - _FAULTS_SHOWN} more"] if len(faults) > _FAULTS_SHOWN else []
            error = cls(f"{len(faults)} faults", details=shown + more, hint=hint)
        error.faults = tuple(faults)
        return error


class LockError(HarnessError):
    """A lock is missing, stale, or the live environment differs from it."""

    exit_code = 3


class BuildError(HarnessError):
    """An environment or an image could not be built."""

    exit_code = 4


class ServerError(HarnessError):
    """A server did not start, died, or misbehaved."""

    exit_code = 5


class MeasurementError(HarnessError):
    """The run ended, but its measurement is not valid."""

    exit_code = 6


class Interrupted(HarnessError):
    """The user asked to stop."""

    exit_code = 130


def _position(fault: Fault) -> tuple[str, int, int]:
    return (fault.where.path, fault.where.line, fault.where.column) if fault.where else ("", 0, 0)
