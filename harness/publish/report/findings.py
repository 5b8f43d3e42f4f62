"""The top of a report in plain words: the answer, whether it counts, whether it is fair, what to do next."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from harness.publish.report.shown import Shown, verdict_counts
from harness.publish.tables import beyond_notes
from harness.recipe.plan import Finding as PlanFinding
from harness.stats.comparison import Comparison
from harness.stats.fairness import Difference
from harness.stats.level import Reason

Weight = Literal["good", "caution", "bad", "plain"]
_PLACES = 6  # levels that a message names before it only counts them
_ALIKE = 3  # messages of one kind that are shown before they are only counted


class Finding(NamedTuple):
    """One sentence and how heavy it weighs."""

    weight: Weight
    text: str


def headline(comparison: Comparison) -> str:
    """The answer of one comparison, as a sentence; its decision stands beside it."""
    if comparison.fairness.blockers and all(row.verdict == "not comparable" for row in comparison.rows):
        return _sentence(f"not comparable: {_first(comparison.fairness.blockers)}")
    policy = comparison.policy
    text = policy.sentence.removeprefix(f"{policy.decision}: ") if policy else comparison.summary
    return _sentence(text)


def beyond(one: Shown) -> list[str]:
    """Effects of a 2x2 and promises of adaptive arms."""
    if one.answer is None:
        return []
    return beyond_notes(one.answer.factorial, [promise.sentence for promise in one.answer.promises])


def validity(one: Shown) -> list[Finding]:
    """Whether the numbers count."""
    return [*_origin(one), *_state(one), *_levels(one), *_servers(one)]


def fairness(comparisons: Sequence[Comparison]) -> list[Finding]:
    """Whether the arms differed in nothing but what was to be compared; what holds for some treatments names them."""
    about: dict[Finding, list[str]] = {}
    for comparison in comparisons:
        for finding in _fair(comparison):
            about.setdefault(finding, []).append(f"`{comparison.treatment}`")
    found = [
        finding if len(names) == len(comparisons) else Finding(finding.weight, f"{', '.join(names)}: {finding.text}")
        for finding, names in about.items()
    ]
    return found or [Finding("plain", "Nothing is compared, so nothing can be unfair.")]


def next_steps(one: Shown, comparisons: Sequence[Comparison]) -> list[Finding]:
    """What to do next, from what is missing, unsettled or doubtful."""
    steps = [*_unfinished(one), *_unsettled(comparisons), *_remedies(one)]
    found = [Finding("plain", text) for text in dict.fromkeys(steps)]
    return found or [Finding("good", "Nothing is left to do.")]


def _first(reasons: Sequence[Reason]) -> str:
    rest = len(reasons) - _ALIKE
    shown = "; ".join(reason.message for reason in reasons[:_ALIKE])
    return f"{shown}; and {rest} more things" if rest > 0 else shown


def _sentence(text: str) -> str:
    """A message as a sentence."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


# Validity


def _origin(one: Shown) -> Iterator[Finding]:
    if one.simulated:
        yield Finding("caution", "Simulated: a cost model made these numbers. They measure no server and no hardware.")
    if one.published:
        yield Finding("caution", f"Published by others, not measured here: {one.published.method}.")
    if one.plan and one.plan.allow_drift:
        yield Finding("caution", f"The environment was allowed to differ from its lock: {one.plan.allow_drift}.")
    yield from (Finding("caution", _sentence(line)) for line in one.busy)
    yield from (Finding("bad", f"Not readable: {trouble}") for trouble in one.troubles)
    yield from (Finding("caution", _sentence(finding.message)) for finding in _doubts(one))


def _state(one: Shown) -> Iterator[Finding]:
    record = one.record or {}
    error = str(record.get("error") or "").split("\n\n", maxsplit=1)[0]
    if one.plan and one.state != "done":
        why = f": {error}" if error else ""
        yield Finding("bad" if one.state == "failed" else "caution", f"The run is not complete, but {one.state}{why}.")
    yield from (Finding("bad", _sentence(str(trouble))) for trouble in record.get("troubles") or ())


def _levels(one: Shown) -> Iterator[Finding]:
    counts = verdict_counts(one.levels())
    total = sum(counts.values())
    if total == 0:
        yield Finding("bad", "No level is finished.")
    elif counts["valid"] == total:
        yield Finding("good", f"{_every(total)} valid.")
    else:
        named = [f"{count} {state}" for state, count in counts.items() if count]
        yield Finding("bad" if counts["invalid"] else "caution", f"Of {total} levels {', '.join(named)}.")
    yield from _reasons(one)
    missing = [f"`{launch.name}` {level}: {fate}" for launch in one.launches for level, fate in launch.missing.items()]
    yield from (Finding("caution", text) for text in _shortened(missing))


def _every(total: int) -> str:
    return "The one measured level is" if total == 1 else f"All {total} measured levels are"


def _reasons(one: Shown) -> Iterator[Finding]:
    """Why levels are suspect or invalid, each message with the levels that it is about."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for level in one.levels():
        known = level.result.verdict.reasons if level.result else ()
        pairs = [(reason.code, reason.message) for reason in known] or [
            ("published", text) for text in level.cell.reasons
        ]
        for code, message in pairs:
            places.setdefault((code, message, level.cell.state), []).append(f"{level.launch} {level.label}")
    by_code: dict[tuple[str, str], list[str]] = {}
    for (code, message, state), where in places.items():
        by_code.setdefault((code, state), []).append(_sentence(f"{message} ({_places(where)})"))
    for (_, state), texts in by_code.items():
        yield from (Finding("bad" if state == "invalid" else "caution", text) for text in _shortened(texts))


def _places(where: Sequence[str]) -> str:
    return ", ".join(where) if len(where) <= _PLACES else f"{len(where)} levels"


def _shortened(texts: Sequence[str]) -> list[str]:
    rest = len(texts) - _ALIKE
    return [*texts[:_ALIKE], *([f"… and {rest} more like it"] if rest > 0 else [])]


def _servers(one: Shown) -> Iterator[Finding]:
    for launch in one.launches:
        if failed := launch.record.get("failed"):
            yield Finding("bad", f"`{launch.name}` did not start: {str(failed).splitlines()[0]}")
        yield from (Finding("caution", f"`{launch.name}`: {text}") for text in launch.record.get("drift") or ())


# Fairness


def _fair(comparison: Comparison) -> Iterator[Finding]:
    fair = comparison.fairness
    if fair.blockers:
        blockers = _shortened([_sentence(reason.message) for reason in fair.blockers])
        yield from (Finding("bad", text) for text in blockers)
    elif fair.checked:
        names = ", ".join({"plan": "plan", "effective": "what the servers say of themselves", "fact": "machine facts",
                           "level": "how levels were offered"}[kind] for kind in fair.checked)  # fmt: skip
        yield Finding("good", f"Nothing else differs between the arms in {names}.")
    yield from _differences(fair.differences)
    yield from (Finding("caution", _sentence(reason.message)) for reason in (*fair.warnings, *comparison.suspect))
    if comparison.equivalence:
        yield Finding("plain", _sentence(f"answers: {comparison.equivalence.sentence}"))
    if comparison.noise:
        share = f"{comparison.noise.spread:.1%}"
        yield Finding("plain", f"Identical launches differ by {share} here (an A/A run, `{comparison.noise.source}`).")
    yield from (Finding("plain" if check.agree else "caution", _sentence(check.message)) for check in comparison.serial)


def _differences(differences: Iterable[Difference]) -> Iterator[Finding]:
    planned = [one for one in differences if one.kind == "plan"] or list(differences)
    treated = [f"`{one.name}`" for one in planned if one.status == "treatment"]
    accepted = [f"`{one.name}`" for one in planned if one.status == "accepted"]
    if treated:
        yield Finding("plain", f"It differs in the declared treatment: {', '.join(dict.fromkeys(treated))}.")
    if accepted:
        yield Finding("caution", f"It also differs in what the recipe accepts: {', '.join(dict.fromkeys(accepted))}.")


# What to do next


def _unfinished(one: Shown) -> Iterator[str]:
    if one.plan and one.state not in {"done", "running"}:
        yield f"Go on with what is missing: `harness run {one.plan.recipe_path} --resume`."
    if one.plan and one.plan.compare and one.answer is None and one.state != "running":
        yield f"No comparison is stored: `harness compare {one.path}` compares what was measured."


def _unsettled(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for comparison in comparisons:
        more = {row.key: row.more_launches for row in comparison.rows if row.more_launches}
        if more:
            keys = ", ".join(key.replace("c", "C=", 1) if key.startswith("c") else key for key in more)
            yield (
                f"Settle `{comparison.treatment}` at {keys}: {max(more.values())} more launches an arm would probably"
                " do (`compare: {launches: ...}` in the recipe)."
            )
        if _single(comparison) and not comparison.published:
            yield (
                "Get intervals: with one launch an arm there are none, and another launch may move every number;"
                " `compare: {launches: 3}` is where they become narrow."
            )
        yield from (
            f"Locate the crossover: measure more levels between C={crossing.between[0]} and C={crossing.between[1]}."
            for crossing in comparison.crossover.crossings
            if crossing.low is None and crossing.between[1] > crossing.between[0] + 1
        )


def _single(comparison: Comparison) -> bool:
    estimates = [row.estimate for row in comparison.rows if row.estimate]
    return bool(estimates) and all(estimate.interval is None for estimate in estimates)


def _remedies(one: Shown) -> Iterator[str]:
    yield from (_sentence(finding.remedy) for finding in _doubts(one) if finding.remedy)
    if one.busy:
        yield "Measure again when nobody else uses the machine; a busy one may make every number smaller."
    if verdict_counts(one.levels())["invalid"]:
        yield "Measure invalid levels again once their cause is gone: `harness run RECIPE` reuses the valid ones."


def _doubts(one: Shown) -> list[PlanFinding]:
    """What the plan itself warned of."""
    return [finding for finding in one.plan.findings if finding.severity in {"warning", "error"}] if one.plan else []
