"""What an audit answers: findings per check, and the two tables that people read. Pure data."""

from collections.abc import Iterable
from typing import Literal

from harness.env.audit.fatbin import Verdict
from harness.strict import Strict

FORMAT = "harness.audit/1"

Check = Literal["one-owner", "record", "cuda-major", "abi", "arch", "versions"]
CHECKS: tuple[Check, ...] = ("one-owner", "record", "cuda-major", "abi", "arch", "versions")
State = Literal["ok", "note", "cannot tell", "fail"]  # best first; a note is worth knowing and stops nothing
STATES: tuple[State, ...] = ("ok", "note", "cannot tell", "fail")


class Finding(Strict):
    """One answer: what it is about, what was seen, and for anything but `ok` what to do."""

    check: Check
    state: State
    subject: str
    message: str
    remedy: str | None = None
    details: tuple[str, ...] = ()


class AbiRow(Strict):
    """One library against this environment's PyTorch.

    `imports` counts the torch-facing symbols it needs; `missing` names those nobody provides; None means that the
    libraries to compare with were not on hand. `built_for` is the range of torch releases its symbols point to.
    """

    distribution: str
    version: str
    path: str
    imports: int
    missing: tuple[str, ...] | None = None
    built_for: str | None = None


class Coverage(Strict):
    """What one library has for one device: the best of its units, and in how many units that is so."""

    verdict: Verdict
    covered: int


class ArchRow(Strict):
    """Device code of one library: its targets, how many units it has, and the coverage per requested architecture."""

    distribution: str
    version: str
    path: str
    targets: tuple[str, ...]
    units: int
    coverage: dict[str, Coverage]


class Report(Strict):
    """The whole answer; `opened` and `absent` say how much of the environment it rests on."""

    format: str = FORMAT
    environment: str
    env_id: str | None
    architectures: tuple[str, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    abi: tuple[AbiRow, ...] = ()
    arch: tuple[ArchRow, ...] = ()
    opened: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that say no."""
        return tuple(finding for finding in self.findings if finding.state == "fail")

    def state(self, check: Check) -> State:
        """The worst finding of one check; a check without findings cannot tell."""
        return worst(finding.state for finding in self.findings if finding.check == check)


def worst(states: Iterable[State]) -> State:
    """The worst of some states; of none, cannot tell."""
    return max(states, key=STATES.index, default="cannot tell")
