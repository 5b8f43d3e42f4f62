"""Where a run's results go: marked blocks in documents, and the logbook."""

from collections.abc import Iterator
from pathlib import Path

from harness.errors import HarnessError, InputError
from harness.publish import docs, logbook
from harness.publish.tables import beyond_notes, comparison_markdown, levels_markdown
from harness.recipe.plan import Plan
from harness.run.answer import Answer
from harness.run.store import Run

LOGBOOK = "LOGBOOK.md"


def check(plan: Plan, root: Path) -> None:
    """Before anything starts: can everything be published that the recipe says?

    Raises:
        InputError: a document or its marker is missing, or the logbook is.
    """
    for target in plan.publish:
        if target["kind"] == "doc":
            docs.check(root / target["doc"], target["block"])
        elif not (root / LOGBOOK).is_file():
            raise InputError(f"there is no `{root / LOGBOOK}`", hint="make it with a title line; the harness appends")


def publish(run: Run, plan: Plan, answer: Answer | None, root: Path) -> Iterator[str]:
    """Write everything the plan names; yields a line for each thing written.

    One target that fails does not keep the others from being written; the first failure is raised at the end.
    """
    first: HarnessError | None = None
    for target in plan.publish:
        try:
            if target["kind"] == "doc":
                changed = docs.publish(root / target["doc"], target["block"], block(run, plan, answer))
                yield f"{target['doc']}: block {target['block']} {'updated' if changed else 'is up to date'}"
            else:
                added = logbook.append(root / LOGBOOK, entry(run, plan, answer))
                yield f"{LOGBOOK}: {'entry added' if added else 'has its entry already'}"
        except HarnessError as error:
            first = first or error
            yield f"not published: {error.message}"
    if first is not None:
        raise first


def stale(run: Run, plan: Plan, answer: Answer | None, root: Path) -> list[str]:
    """What `publish` would change, as diffs; empty when every document says what the run says."""
    found = [
        docs.stale(root / target["doc"], target["block"], block(run, plan, answer))
        for target in plan.publish
        if target["kind"] == "doc"
    ]
    return [difference for difference in found if difference]


def block(run: Run, plan: Plan, answer: Answer | None) -> str:
    """The content of a document's block: answers, then each arm's levels; the run and the cells in comments."""
    parts = [f"<!-- run {run.run_id}; plan {plan.digest[:16]} -->"]
    if answer:
        parts += [comparison_markdown(comparison) for comparison in answer.comparisons]
        beyond = beyond_notes(answer.factorial, [promise.sentence for promise in answer.promises])
        parts += ["\n".join(f"- {line}" for line in beyond)] if beyond else []
    for launch in plan.launches:
        results = [result for name, result in run.levels() if name == launch.name]
        if not results:
            continue
        cells = " ".join(f"{result.level['name']}={result.cell_id[:12]}" for result in results)
        label = " (simulated)" if results[0].simulated else ""
        parts.append(
            f"**{launch.arm}**, launch `{launch.name}`{label}\n<!-- cells {cells} -->\n\n{levels_markdown(results)}"
        )
    environments = sorted({f"{arm.env} `{str(arm.env_id)[:16]}`" for arm in plan.arms.values() if arm.env})
    parts.append(f"Run `{run.run_id}`, environment {', '.join(environments) or 'none'}.")
    return "\n\n".join(parts)


def entry(run: Run, plan: Plan, answer: Answer | None) -> logbook.Entry:
    """The logbook's entry for a run, failed ones included."""
    state = run.state()
    results = list(run.levels())
    simulated = " (simulated)" if any(result.simulated for _, result in results) else ""
    verdict = answer.sentence if answer else f"{len(results)} levels measured"
    if state["state"] != "done":
        verdict = f"{state['state']}: {str(state.get('error', '')).splitlines()[0]}"
    surprises = [
        f"{launch} {result.level['name']}: {result.verdict.state}: {reason.message}"
        for launch, result in results
        for reason in result.verdict.reasons
    ]
    return logbook.Entry(
        date=str(state.get("at", ""))[:10],
        run_id=run.run_id,
        recipe=plan.recipe,
        question=plan.question,
        verdict=verdict + simulated,
        environments=sorted({f"{arm.env} {str(arm.env_id)[:16]}" for arm in plan.arms.values() if arm.env}),
        surprises=surprises,
    )
