"""Why a server died, does not come up, or will not: from its log, its exit code and what it was doing.

Signatures are data: an engine's own first, then those every CUDA server shares. A line explains a death once it has
happened; only a `decisive` line ends the waiting before. An unknown death is called unknown, and shows the last lines
of the process that had something to say.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.engines.engine import Signature
from harness.run.logs import REAPER, LogLine
from harness.run.signatures import GENERIC, HANGS

Phase = Literal["start", "measure", "stop"]
_SHOWN = 20
_EVIDENCE = 5
_RECENT = 400  # lines before a death in which its cause is looked for first
_ALARM = re.compile(
    r"traceback|error|fatal|critical|exception|abort|assert|segmentation|terminate called|core dumped|killed|panic",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What happened: a class by name, the lines that say so, what to do, and whether trying again makes sense.

    `known` is False where nobody could tell; `also` names further signatures that were seen. `where` says which rank of
    a server that spans machines, empty for any other; `of_a_peer`: it went because another rank had.
    """

    name: str
    evidence: tuple[str, ...]
    remedy: str
    retry: bool = False
    known: bool = True
    exit_code: int | None = None
    phase: Phase = "start"
    source: str = ""
    also: tuple[str, ...] = ()
    where: str = ""
    of_a_peer: bool = False

    def __str__(self) -> str:
        return f"{self.name} on {self.where}" if self.where else self.name


@dataclass(frozen=True, slots=True)
class Death:
    """The circumstances of a death: exit code as subprocess has it, phase, the kernel's OOM kills meanwhile."""

    exit_code: int | None
    phase: Phase
    oom_kills: int = 0


def decisive(lines: Iterable[LogLine], signatures: Sequence[Signature]) -> Signature | None:
    """The first decisive signature among new lines."""
    patterns = [(signature, re.compile(signature.regex)) for signature in signatures if signature.decisive]
    for line in lines:
        if line.writer != REAPER:
            for signature, pattern in patterns:
                if pattern.search(line.text):
                    return signature
    return None


def explain(lines: Sequence[LogLine], signatures: Sequence[Signature], death: Death) -> Diagnosis:
    """Why a server died, or has to be given up.

    Args:
        lines: its log.
        signatures: the engine's; the generic ones are added after them, and earlier ones are nearer to the root.
        death: how it ended.
    """
    ours = [line for line in lines if line.writer != REAPER]
    for stretch in (ours[-_RECENT:], ours):
        matches = [(found, hits) for found in (*signatures, *GENERIC) if (hits := _hits(found, stretch))]
        if matches:
            return _known(matches, ours, death)
    return _unknown(ours, death)


def hung(lines: Sequence[LogLine], death: Death, waited_s: float) -> Diagnosis:
    """Why a server did not come up in time: by what it was last busy with."""
    ours = [line for line in lines if line.writer != REAPER]
    shown = tuple(str(line) for line in ours[-_SHOWN:])
    for line in reversed(ours[-50:]):
        for found in HANGS:
            if re.search(found.regex, line.text):
                return Diagnosis(found.name, shown, found.remedy, found.retry, True, None, death.phase, found.source)
    remedy = "raise `timeouts.start_s` if it was still making progress; its last lines are above"
    return Diagnosis(f"not ready after {waited_s:.0f} s", shown, remedy, True, False, None, death.phase)


def clean_stop(exit_code: int | None, lines: Sequence[LogLine]) -> bool:
    """Whether a stop that we asked for was a clean one.

    The exit code does not tell: SGLang ends itself with SIGKILL (137) after a clean stop as after a crash. So the log
    does: no sign of a crash before the first signal.
    """
    if exit_code in {0, -signal.SIGTERM, -signal.SIGINT}:
        return True
    first_signal = next((n for n, line in enumerate(lines) if line.writer == REAPER and " to " in line.text), None)
    if first_signal is None:
        return False
    crash = [found for found in GENERIC if found.name in {"child process failed", "illegal memory access", "watchdog"}]
    return not any(_hits(found, lines[:first_signal]) for found in crash)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot, on the whole machine."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def last_lines(lines: Sequence[LogLine], count: int = _SHOWN) -> tuple[str, ...]:
    """The last lines of the process that raised the alarm last; of all of them when none did."""
    alarms = [line.writer for line in lines[-_RECENT:] if _ALARM.search(line.text)]
    chosen = [line for line in lines if not alarms or line.writer == alarms[-1]]
    return tuple(str(line) for line in chosen[-count:])


def _hits(signature: Signature, lines: Sequence[LogLine]) -> list[LogLine]:
    pattern = re.compile(signature.regex)
    return [line for line in lines if line.writer != REAPER and pattern.search(line.text)]


def _known(matches: list[tuple[Signature, list[LogLine]]], lines: Sequence[LogLine], death: Death) -> Diagnosis:
    found, hits = matches[0]
    writer = hits[-1].writer
    last = [line for line in lines if line.writer == writer][-_EVIDENCE:]
    chosen = {id(line) for line in (*hits[:_EVIDENCE], *last)}
    return Diagnosis(
        name=found.name,
        evidence=tuple(str(line) for line in lines if id(line) in chosen),
        remedy=found.remedy,
        retry=found.retry,
        exit_code=death.exit_code,
        phase=death.phase,
        source=found.source,
        also=tuple(other.name for other, _ in matches[1:4]),
        of_a_peer=any(other.of_a_peer for other, _ in matches),
    )


def _unknown(lines: Sequence[LogLine], death: Death) -> Diagnosis:
    evidence, code = last_lines(lines), death.exit_code
    if code == -signal.SIGKILL and death.oom_kills:
        remedy = "the kernel ended it for want of memory (RAM, not GPU): smaller context or cache, or a larger machine"
        return Diagnosis("killed by the kernel: out of memory", evidence, remedy, False, True, code, death.phase)
    if code is not None and code < 0:
        return Diagnosis(_by_signal(code), evidence, _SIGNAL_REMEDY, code == -signal.SIGKILL, False, code, death.phase)
    how = "a child process crashed" if code is None else f"ended with {code}"
    remedy = "no signature fits: read the last lines, and the whole server.log"
    return Diagnosis(f"unknown ({how})", evidence, remedy, False, False, code, death.phase)


_SIGNAL_REMEDY = "it was ended from outside or crashed in native code: `dmesg` may say more"


def _by_signal(code: int) -> str:
    try:
        return f"unknown (ended by {signal.Signals(-code).name})"
    except ValueError:
        return f"unknown (ended by signal {-code})"
