"""What can be known of an environment without a GPU and without importing it: who owns which file, which CUDA it links,
whether its extensions fit its PyTorch, for which GPUs it holds code, and which known rules speak against it.
"""

from collections.abc import Callable, Sequence

from harness.env import rules
from harness.env.audit import abi, architectures, libraries, owners, survey, versions
from harness.env.audit.distributions import Source
from harness.env.audit.report import CHECKS, Check, Finding, Report

_NAMED = 6  # of the wheels that are missing, the largest by name

__all__ = ["CHECKS", "Finding", "Report", "Source", "run"]


def run(
    source: Source,
    *,
    targets: Sequence[str] = (),
    checks: Sequence[Check] = CHECKS,
    known: Sequence[rules.Rule] = (),
    context: rules.Context | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Audit an environment.

    Args:
        source: the distributions, on hand or not.
        targets: the GPU architectures it is for, such as `sm_120a`.
        checks: which checks to make.
        known: version rules.
        context: what is known of the environment beside its packages, for the rules.
        progress: told each distribution's name when it has been read.

    Raises:
        InputError: a wheel is damaged or a file cannot be read.
    """
    seen = survey.take(source, progress=progress)
    context = context or rules.Context(packages=seen.versions())
    by_check: dict[Check, Callable[[], list[Finding]]] = {
        "one-owner": lambda: owners.one_owner(seen),
        "record": lambda: owners.record(seen),
        "cuda-major": lambda: libraries.findings(seen),
        "abi": lambda: abi.findings(seen),
        "arch": lambda: architectures.findings(seen, targets),
        "versions": lambda: versions.findings(known, context),
    }
    return Report(
        environment=source.label,
        env_id=source.env_id,
        architectures=tuple(targets),
        checks=tuple(checks),
        findings=tuple(finding for check in checks for finding in (*by_check[check](), *_unopened(check, seen))),
        abi=abi.rows(seen) if "abi" in checks else (),
        arch=architectures.rows(seen, targets) if "arch" in checks else (),
        opened=tuple(item.label for item in seen.contents),
        absent=tuple(f"{item.name} {item.version}" for item in seen.absent),
    )


def _unopened(check: Check, seen: survey.Survey) -> list[Finding]:
    """What a check could not look at: never taken for fine."""
    if check == "versions":
        return []
    every = check in ("one-owner", "record")
    besides = "nvidia-" if check == "abi" else " "  # NVIDIA's own libraries do not extend PyTorch
    wanted = [item for item in seen.absent if every or (item.binary and not item.name.startswith(besides))]
    absent = sorted(wanted, key=lambda item: -item.size)
    if not absent:
        return []
    what, remedy = ("distributions", "`harness fetch` gets all") if every else ("binary wheels", "`--fetch` gets them")
    names = ", ".join(f"{item.name} ({item.size / 1e6:.0f} MB)" for item in absent[:_NAMED])
    more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
    return [
        Finding(
            check=check,
            state="cannot tell",
            subject=f"{len(absent)} {what}",
            message=f"were not opened, because they are not on hand: {names}{more}",
            remedy=remedy + ("" if every else "; NVIDIA's own come with `harness fetch`"),
        )
    ]
