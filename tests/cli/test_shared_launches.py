"""Arms that differ only in what they ask are measured on one server, which is stopped when nobody else shares it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import QUICK, Workplace

SHARED = """\
  longer: {workload: {max_tokens: 16}}
  speculative:
"""


def recipe(workplace: Workplace, *changes: tuple[str, str]) -> Path:
    text = QUICK.replace("  speculative:\n", SHARED, 1)
    text = text.replace('treatment: ["server.args.speculative-*"]', 'treatment: ["workload.*", "server.args.*"]')
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return workplace.recipe(text)


def launches(run: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(run.glob("launches/*/launch.json"))}


@pytest.mark.timeout(180)
def test_one_server_answers_two_arms_and_the_third_has_its_own(workplace: Workplace) -> None:
    said = workplace.harness("run", recipe(workplace), "--no-publish")
    assert said.code in {0, 1}, said.err
    told = launches(workplace.run())
    assert list(told) == ["01-baseline", "02-longer", "03-speculative"]
    pids = [record["answers"]["/server_info"]["state"]["pid"] for record in told.values()]
    assert pids[0] == pids[1] != pids[2]
    assert [record.get("shares") for record in told.values()] == [None, "01-baseline", None]
    assert "02-longer] goes on with the server of 01-baseline" in said.err
    # Stopped before the next one was started, and proven to be gone.
    assert "stop" in told["01-baseline"]
    assert "stop" in told["03-speculative"]
    assert workplace.servers() == []
    assert workplace.harness("verify", workplace.run()).code == 0


@pytest.mark.timeout(180)
def test_the_arm_after_a_death_gets_a_fresh_server(workplace: Workplace) -> None:
    """Generations: the proof of readiness, a warm-up, then the first level; the server ends itself at the eighth."""
    healthy = "args: {step-ms: 2, sequence-ms: 0.1}"
    dying = healthy.replace("}", ', fault: ["die-after-requests=8"]}')
    path = recipe(workplace, (healthy, dying), ("timeouts:", "on_failure: skip-level\ntimeouts:"))
    said = workplace.harness("run", path, "--no-publish")
    told = launches(workplace.run())
    assert said.code == 6  # levels were lost
    assert set(told) == {"01-baseline", "02-longer", "03-speculative"}
    assert told["02-longer"].get("shares") is None
    assert workplace.servers() == []


@pytest.mark.timeout(180)
def test_a_failure_between_arms_that_share_leaves_no_server(
    workplace: Workplace, wait_for: Callable[[Callable[[], bool], str], None]
) -> None:
    """The second arm's prompts are not there when it wants to start; what was kept for it is stopped all the same."""
    path = recipe(workplace, ("max_tokens: 16}", 'max_tokens: 16, prompts: "late.jsonl"}'))
    late = workplace.root / "late.jsonl"
    late.write_text("".join(f'{{"id": "p{n}", "prompt": "say {n}"}}\n' for n in range(64)))
    process = workplace.start("run", path, "--no-publish")
    first = "runs/*/launches/01-baseline/levels/c1/level.json"
    wait_for(lambda: any(workplace.root.glob(first)), "the first level")
    late.unlink()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "late.jsonl" in err
    assert "stop" in launches(workplace.run())["01-baseline"]
    assert workplace.servers() == []
