"""Version rules: what is known to break between releases, from `envspecs/rules/`."""

from collections.abc import Sequence

from harness.env import rules
from harness.env.audit.report import Finding, State

_STATES: dict[rules.Severity, State] = {
    "error": "fail",
    "wrong answers": "fail",
    "no-op": "note",
    "slow": "note",
    "warning": "note",
}


def findings(known: Sequence[rules.Rule], context: rules.Context) -> list[Finding]:
    """The rules that fire on an environment; those that ask for what is not known of it are left out."""
    known_facts = {name for name in rules.Context.__dataclass_fields__ if getattr(context, name) is not None}
    asked = rules.about(known, frozenset(known_facts))
    found = [_finding(fired) for fired in rules.fire(asked, context)]
    if found:
        return found
    message = f"{len(asked)} rules hold nothing against it"
    return [Finding(check="versions", state="ok", subject="the environment", message=message)]


def _finding(fired: rules.Fired) -> Finding:
    told = fired.verdict == "fires"
    return Finding(
        check="versions",
        state=_STATES[fired.rule.severity] if told else "cannot tell",
        subject=", ".join(fired.seen) or fired.rule.id,
        message=f"{fired.rule.message} [{fired.rule.severity}]"
        if told
        else f"{fired.rule.id}: not known: {', '.join(fired.missing)}",
        remedy=fired.rule.remedy,
        details=(f"rule {fired.rule.id}; source: {fired.rule.source}",),
    )
