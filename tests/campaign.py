"""The campaign of the seeds: which simulated twin each recipe has, and what is true of the twins, by formula."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.recipe.plan import Plan

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "recipes" / "seeds"
SIMULATED = ROOT / "recipes" / "simulated"
TWINS = {
    "eagle3-vs-baseline": "seeds-eagle3",
    "eagle3-vs-baseline-encyclopedic": "seeds-eagle3-encyclopedic",
    "serial": "seeds-serial",
    "stack-2x2": "seeds-2x2",
    "eagle3-current": "crossover",
    "crossover": "refine",
    "adaptive": "crossover",
    "speculation-matrix": "seeds-matrix",
    "spec-v2": "seeds-spec-v2",
    "nccl-tuning": "seeds-nccl",
    "all-reduce-flags": "seeds-all-reduce-flags",
    "all-reduce": "seeds-all-reduce",
    "decode-profile": "seeds-profile",
}
MARGIN = 0.02  # a recipe's default: a ratio this near 1 is no difference


def throughput(args: Mapping[str, Any], concurrency: int, tokens: int) -> float:
    """tok/s of a closed loop in model time, by docs/simulated-engine.md: C n / (N(n) T(C)), without noise."""
    drafts = _drafts(args, concurrency)
    share = args.get("speculative-acceptance", 0.0)
    step = args["step-ms"] + args["sequence-ms"] * concurrency
    if drafts:
        step += args.get("speculative-step-ms", 0.0) + drafts * args.get("speculative-token-ms", 0.0) * concurrency
    return 1000 * concurrency * tokens / (steps(tokens, drafts, share) * step)


def steps(tokens: int, drafts: int, share: float) -> float:
    """N(n) = 1 + sum_j P(j) N(n - j): the mean number of steps until a request has its n tokens."""
    chances = [share ** (j - 1) * (1 - share) for j in range(1, drafts + 1)] + [share**drafts]
    needed = [0.0]
    for n in range(1, tokens + 1):
        needed.append(1 + sum(chance * needed[max(0, n - j)] for j, chance in enumerate(chances, start=1)))
    return needed[tokens]


def ratio(plan: Plan, treatment: str, concurrency: int) -> float:
    """True throughput of an arm over the base's."""
    assert plan.compare is not None
    arms = [plan.arms[treatment], plan.arms[plan.compare["base"]]]
    one, other = (throughput(arm.args, concurrency, arm.workload["max_tokens"]) for arm in arms)
    return one / other


def truth(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Treatment, level and what is true there, for every level of a plan: `better`, `worse` or `same`."""
    assert plan.compare is not None
    levels = {cell.level.name: cell.level.concurrency or 1 for _, cell in plan.cells()}
    for name in plan.arms:
        for level, concurrency in levels.items() if name != plan.compare["base"] else ():
            true = ratio(plan, name, concurrency)
            yield name, level, "same" if abs(true - 1) < MARGIN else "better" if true > 1 else "worse"


def _drafts(args: Mapping[str, Any], batch: int) -> int:
    tiers = [part.split(":") for part in args.get("speculative-tiers", "").split(",") if part]
    fitting = [int(drafts) for smallest, drafts in tiers if batch >= int(smallest)]
    return fitting[-1] if fitting else int(args.get("speculative-tokens", 0))


# The tables of docs/campaign.md

_CAUTIONS = {"no-lock", "few-requests", "prompts-wrap"}  # of the plan, not of the stack


def recipes_table(plans: Mapping[str, Plan], twins: Mapping[str, Plan]) -> str:
    """Every recipe of the seeds: what it asks, its arms, its twin, and what the twin must answer."""
    rows = ["| recipe | question | arms x launches | twin | what is true of the twin |", "|---|---|---|---|---|"]
    for name, plan in sorted(plans.items()):
        per_arm = len(plan.launches) // len(plan.arms)
        launches = f"{per_arm} and more" if plan.refine else str(per_arm)
        twin = TWINS[name]
        cells = [
            f"[`{name}`](../recipes/seeds/{name}.yaml)",
            plan.question,
            f"{_arms(plan)} x {launches}",
            f"[`{twin}`](../recipes/simulated/{twin}.yaml)",
            _answer(twins[twin]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def rules_table(plans: Mapping[str, Plan]) -> str:
    """Every rule that fires on a recipe of the seeds, how bad it is, and on which."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, plan in sorted(plans.items()):
        for finding in plan.findings:
            if finding.id not in _CAUTIONS:
                found.setdefault((finding.severity, finding.id), []).append(f"`{name}`")
    rows = ["| severity | rule | recipes |", "|---|---|---|"]
    rows += [f"| {severity} | `{rule}` | {', '.join(names)} |" for (severity, rule), names in sorted(found.items())]
    return "\n".join(rows)


def _arms(plan: Plan) -> str:
    families: dict[str, int] = {}
    for name in plan.arms:
        family = name.split(",")[0]
        families[family] = families.get(family, 0) + 1
    return ", ".join(f"`{name}`" if count == 1 else f"{count} of `{name}`" for name, count in families.items())


def _answer(plan: Plan) -> str:
    """`eagle3` worse at 1, 2, 5; arms of which the same is true stand together."""
    patterns: dict[str, list[str]] = {}
    for name in plan.arms:
        mine = [(level.removeprefix("c"), said) for arm, level, said in truth(plan) if arm == name]
        words = [
            f"{said} at {', '.join(level for level, one in mine if one == said)}"
            for said in ("better", "same", "worse")
            if said in {one for _, one in mine}
        ]
        if words:
            patterns.setdefault(", ".join(words), []).append(f"`{name}`")
    return "; ".join(f"{_some(names)} {words}" for words, names in patterns.items())


def _some(names: list[str]) -> str:
    return " and ".join(names) if len(names) <= 2 else f"all {len(names)} treatments"
