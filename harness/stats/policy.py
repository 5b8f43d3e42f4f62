"""From verdicts to a decision: at which concurrencies the treatment should be on, and how to tell the engine so.

Only what the comparison claims is used: a treatment is on where it is better, and off everywhere else, also where
nothing is resolved. It is turned on nowhere while the servers' effective configurations are not known, and not
everywhere while a level could not be compared. Between two levels the switch is at the lower end of the crossover's
interval.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from harness.stats.arms import Arm, Launch
from harness.stats.comparison import Comparison, Policy, Row
from harness.stats.level import Reason


def decide(comparison: Comparison, plan: Mapping[str, Any] | None = None) -> Policy:
    """The policy that a comparison supports.

    Args:
        comparison: speculation (treatment) against none (base).
        plan: the treatment's plan, flattened; where it speculates, the policy is also given as its engine's lever.
    """
    levels = [row for row in comparison.rows if row.level.get("mode") != "serial"]
    numbered = [row for row in levels if row.concurrency]
    rows = [row for row in numbered if row.verdict != "not comparable"]
    on = _ranges(comparison, numbered)
    decision = _decision(rows, on)
    if decision.startswith("go") and (doubts := _doubts(comparison, levels if decision == "go" else rows)):
        decision, on = "undecided", ()
        why = f"nothing is decided while {' and '.join(doubts)}; {comparison.crossover.sentence}"
    else:
        why = comparison.summary if decision == "undecided" else comparison.crossover.sentence
    return Policy(
        treatment=comparison.treatment,
        decision=decision,
        on=on,
        sentence=_sentence(comparison.treatment, decision, on, why),
        levers=_levers(on, rows, plan or {}),
        simulated=comparison.simulated,
    )


def _doubts(comparison: Comparison, levels: Sequence[Row]) -> list[str]:
    """What must be known before a treatment is turned on at all of some levels."""
    out = [f"C={row.concurrency}" if row.concurrency else row.key for row in levels if row.verdict == "not comparable"]
    doubts = [f"{', '.join(out)} cannot be compared"] if out else []
    if "effective" not in comparison.fairness.checked:
        doubts.append("the effective configuration is not known for both arms")
    return doubts


def better_arm(base: Arm, treatment: Arm, comparison: Comparison) -> Arm:
    """An arm made of the better of two at each level, launch pair by launch pair: what an adaptive arm has to match."""
    chosen = {row.key: treatment if row.direction == "treatment" else base for row in comparison.rows}
    launches = [
        Launch(
            launch=f"better-{block}",
            block=block,
            cells=tuple(
                cell
                for key, arm in chosen.items()
                for launch in arm.launches
                if launch.block == block and (cell := launch.cell(key)) is not None
            ),
        )
        for block in sorted({launch.block for arm in (base, treatment) for launch in arm.launches})
    ]
    return Arm(name=f"better of {base.name} and {treatment.name}", launches=tuple(launches), simulated=base.simulated)


def kept_promise(adaptive: Comparison, margin: float) -> tuple[Reason, ...]:
    """Where an adaptive arm is worse than the better of the two fixed arms by more than the margin.

    Args:
        adaptive: the adaptive arm (treatment) against the better fixed arm of each level (`better_arm`).
        margin: as a share.

    Returns:
        One reason a level that breaks the promise; none if it is kept wherever it was tested.
    """
    limit = 1 / (1 + margin)
    return tuple(
        Reason(
            code="promise-broken",
            message=f"at {row.key} the adaptive arm reaches {row.estimate.ratio:.3f} of the better arm",
        )
        for row in adaptive.rows
        if row.estimate is not None and row.verdict == "worse" and row.estimate.ratio < limit
    )


def _ranges(comparison: Comparison, rows: Sequence[Row]) -> tuple[tuple[int, int], ...]:
    """Runs of levels where the treatment is better, stretched to the certain side of a crossover next to them.

    A level between them that could not be compared ends a run.
    """
    ranges: list[list[int]] = []
    previous: Row | None = None
    for row in rows:
        at = int(row.concurrency or 1)
        if row.verdict == "better":
            if previous is not None and previous.verdict == "better":
                ranges[-1][1] = at
            else:
                ranges.append([at, at])
        previous = row
    for crossing in comparison.crossover.crossings:
        for span in ranges:
            if span[1] == crossing.between[0] and crossing.below == comparison.treatment and crossing.low:
                span[1] = max(span[1], math.floor(crossing.low))
            if span[0] == crossing.between[1] and crossing.above == comparison.treatment and crossing.high:
                span[0] = min(span[0], math.ceil(crossing.high))
    return tuple((first, last) for first, last in ranges)


def _decision(rows: Sequence[Row], on: Sequence[tuple[int, int]]) -> Literal["go", "go in range", "no-go", "undecided"]:
    verdicts = {row.verdict for row in rows}
    if verdicts == {"better"}:
        return "go"
    if on:
        return "go in range"
    return "no-go" if rows and verdicts <= {"worse", "equivalent"} else "undecided"


def _sentence(name: str, decision: str, on: Sequence[tuple[int, int]], why: str) -> str:
    spans = " and ".join(f"{first}..{last}" if first != last else f"{first}" for first, last in on)
    return {
        "go": f"go: turn `{name}` on; {why}",
        "go in range": f"go in range: turn `{name}` on at concurrency {spans} and off elsewhere; {why}",
        "no-go": f"no-go: leave `{name}` off; {why}",
        "undecided": f"undecided: leave `{name}` off until more is known; {why}",
    }[decision]


def _levers(on: Sequence[tuple[int, int]], rows: Sequence[Row], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The policy in the words of the treatment's engine; speculation is off beyond the measured range.

    SGLang's file maps the lowest batch size of a tier to its candidate steps, 0 being off; it works for EAGLE and
    EAGLE3 with topk 1 only (docs, adaptive speculative decoding; 0.5.11 and later). vLLM's value lists
    [first batch size, last batch size, tokens], 0 being off. The simulated engine has the first form in one line.
    """
    spans = _spans(on, max((int(row.concurrency or 1) for row in rows), default=1))
    steps, topk = _argument(plan, "speculative-num-steps"), _argument(plan, "speculative-eagle-topk")
    if isinstance(steps, int):
        if topk not in {None, 1}:
            return {"sglang": f"--speculative-adaptive needs --speculative-eagle-topk 1, the treatment has {topk}"}
        tiers = {str(first): {"candidate_steps": [steps if is_on else 0]} for first, _, is_on in spans}
        return {"sglang --speculative-adaptive-config": tiers}
    if (tokens := _speculative_tokens(_argument(plan, "speculative-config"))) is not None:
        table = [[first, last, tokens if is_on else 0] for first, last, is_on in spans]
        return {"vllm num_speculative_tokens_per_batch_size": table}
    if isinstance(drafts := _argument(plan, "speculative-tokens"), int) and drafts > 0:
        return {
            "simulated --speculative-tiers": ",".join(f"{first}:{drafts if is_on else 0}" for first, _, is_on in spans)
        }
    return {}


def _spans(on: Sequence[tuple[int, int]], highest: int) -> list[tuple[int, int, bool]]:
    """All batch sizes from 1 on as (first, last, on); the last one is off and begins above the measured range."""
    spans: list[tuple[int, int, bool]] = []
    following = 1
    for first, last in on:
        if first > following:
            spans.append((following, first - 1, False))
        spans.append((first, last, True))
        following = last + 1
    return [*spans, (following, max(highest, following), False)]


def _argument(plan: Mapping[str, Any], name: str) -> Any:
    for key, value in plan.items():
        if key.removeprefix("server.").removeprefix("args.").replace("_", "-") == name:
            return value
    return None


def _speculative_tokens(config: Any) -> int | None:
    """`num_speculative_tokens` of vLLM's JSON argument."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None
    tokens = config.get("num_speculative_tokens") if isinstance(config, Mapping) else None
    return tokens if isinstance(tokens, int) else None
