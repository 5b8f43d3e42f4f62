"""What speculation moves by itself in SGLang must not make the campaign's rows "not comparable", and nothing else may.

The values are what `server_args.py` of 0.5.9 and `arg_groups/` of 0.5.23 make of the recipes' flags on a board of
97,887 MiB: 2 GiB reserved for a draft, other batches with a graph, 48 requests at most where nothing was said, and the
overlap scheduler off under a tree.
"""

from pathlib import Path

import campaign
import pytest

from harness.recipe.decide import decide
from harness.recipe.plan import Plan
from harness.recipe.site import Site
from harness.stats.arms import Arm, Cell, Launch
from harness.stats.fairness import Fairness, Permission, check, flatten

PLAIN_GRAPHS = [1, 2, 4, 8, 12, *range(16, 129, 8)]
DRAFTING_GRAPHS = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 129, 8)]
OLD = (
    {
        "mem_fraction_static": 0.896, "max_total_num_tokens": 1_300_000, "max_running_requests": None,
        "effective_max_running_requests_per_dp": 2048, "disable_overlap_schedule": False, "cuda_graph_max_bs": 128,
        "speculative_algorithm": None, "attention_backend": "flashinfer",
        **{f"cuda_graph_bs.{index}": batch for index, batch in enumerate(PLAIN_GRAPHS)},
    },
    {
        "mem_fraction_static": 0.875, "max_total_num_tokens": 1_190_000, "max_running_requests": 48,
        "effective_max_running_requests_per_dp": 48, "disable_overlap_schedule": True, "cuda_graph_max_bs": 128,
        "speculative_algorithm": "EAGLE3", "speculative_num_steps": 2, "attention_backend": "flashinfer",
        **{f"cuda_graph_bs.{index}": batch for index, batch in enumerate(DRAFTING_GRAPHS)},
    },
)  # fmt: skip
NEW = tuple(
    {name.replace("cuda_graph_bs.", "cuda_graph_config.decode.bs."): value for name, value in arm.items()}
    | {"max_running_requests": 256, "effective_max_running_requests_per_dp": 256, "disable_overlap_schedule": False}
    for arm in OLD
)


def judged(plan: Plan, effective: tuple[dict[str, object], ...], **changes: object) -> Fairness:
    """Two arms of a plan whose servers said this of themselves."""
    assert plan.compare is not None
    cell = Cell("c10", {"mode": "closed", "concurrency": 10, "requests": 30}, {"output_tok_s": 100.0})
    arms = [
        Arm(name, (Launch(f"00-{name}", 0, (cell,), said, {}),), flatten({"server": {"args": plan.arms[name].args}}))
        for name, said in zip(("baseline", "eagle3"), ({**effective[0]}, {**effective[1], **changes}), strict=True)
    ]
    return check(arms[0], arms[1], Permission(plan.compare["treatment"], plan.compare["accept"]))


@pytest.mark.parametrize(("recipe", "effective"), [("eagle3-vs-baseline", OLD), ("eagle3-current", NEW)])
def test_rows_stay_comparable_unless_something_else_moves(
    recipe: str, effective: tuple[dict[str, object], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(campaign.ROOT)
    _, plan = decide(campaign.SEEDS / f"{recipe}.yaml", Site(Path("none")))
    assert judged(plan, effective).blockers == ()
    moved = judged(plan, effective, attention_backend="triton").blockers
    assert [reason.message for reason in moved] == ["attention_backend differs (flashinfer / triton)"]
