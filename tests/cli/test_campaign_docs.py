"""docs/campaign.md says what recipes, rules and simulated twins say; `UPDATE_GOLDEN=1 pytest ...` rewrites it."""

import os
import re
from pathlib import Path

import campaign
import pytest
from cli import golden

from harness.env import rules
from harness.recipe.decide import decide
from harness.recipe.plan import Plan
from harness.recipe.site import Site

DOC = campaign.ROOT / "docs" / "campaign.md"
SITE = Site(Path("none"))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Every recipe of the seeds, planned."""
    return {path.stem: planned(path) for path in sorted(campaign.SEEDS.glob("*.yaml"))}


def planned(path: Path) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(campaign.ROOT)
        return decide(path.relative_to(campaign.ROOT), SITE)[1]


def check(block: str, text: str) -> None:
    """Compare with what stands between the block's marks, or put it there when asked to."""
    marks = f"<!-- {block} -->\n", f"\n<!-- /{block} -->"
    whole = DOC.read_text()
    before, rest = whole.split(marks[0])
    found, after = rest.split(marks[1])
    if os.environ.get("UPDATE_GOLDEN"):
        DOC.write_text(before + marks[0] + text + marks[1] + after)
        return
    assert found == text, f"{DOC.name} is stale; UPDATE_GOLDEN=1 rewrites it"


def test_whatever_fires_on_a_recipe_of_the_seeds_is_accepted_with_a_reason(plans: dict[str, Plan]) -> None:
    unexplained = {(name, found.id) for name, plan in plans.items() for found in plan.findings if not found.accepted}
    assert unexplained == set()


def test_no_recipe_of_the_seeds_would_be_refused(plans: dict[str, Plan]) -> None:
    refused = [(name, found.id) for name, plan in plans.items() for found in plan.findings if found.severity == "error"]
    assert refused == []


def test_the_table_of_recipes_is_what_they_plan(plans: dict[str, Plan]) -> None:
    twins = {name: planned(campaign.SIMULATED / f"{name}.yaml") for name in set(campaign.TWINS.values())}
    check("recipes", campaign.recipes_table(plans, twins))


def test_the_table_of_rules_is_what_fires(plans: dict[str, Plan]) -> None:
    check("fires", campaign.rules_table(plans))


def test_the_rules_on_the_published_flags_are_the_commands_own_words() -> None:
    said = (golden.FOLDER / "plan-seeds.txt").read_text()
    start = re.search(r"^(warning|no-op|error): ", said, re.MULTILINE)
    assert start is not None
    check("rules", f"```\n{said[start.start() :].rstrip()}\n```")


def test_every_rule_that_fires_on_the_published_flags_is_explained(plans: dict[str, Plan]) -> None:
    known = {rule.id for rule in rules.load_all(campaign.ROOT / "envspecs" / "rules")}
    fired = {found.id for found in plans["eagle3-vs-baseline"].findings if found.id in known}
    explained = set(re.findall(r"^\| `([a-z0-9-]+)` \|", DOC.read_text(), re.MULTILINE))
    assert fired <= explained, fired - explained
