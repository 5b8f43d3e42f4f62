"""Tracing a level: what is said when there is no trace."""

import time
from pathlib import Path

import pytest
from servers import free_port

from harness.engines.engine import Server
from harness.engines.simulated import ENGINE
from harness.recipe.plan import PlannedLevel
from harness.run.judge import NOTED
from harness.run.launch import Launched
from harness.run.profiling import Profiler


def traced(folder: Path, *, after_s: float, active: int) -> dict[str, object]:
    """What a profiler says of a level at C=4 on a server that is not there."""
    level = PlannedLevel(
        name="c4",
        mode="closed",
        concurrency=4,
        profile={"after_s": after_s, "seconds": 0.1},
        request_timeout_s=1,
        level_timeout_s=9,
    )
    server = Launched(ENGINE, Server("simulated", "127.0.0.1", free_port()), None, folder / "server.log", 0.0)
    with Profiler(server, level, folder) as profiler:
        profiler.seen({"active": active})
        until = time.monotonic() + 20
        while active == 4 and after_s == 0 and not profiler.facts and time.monotonic() < until:
            time.sleep(0.05)
    return profiler.facts


@pytest.mark.parametrize(
    ("after_s", "active", "trouble"),
    [
        (60.0, 4, "the level was over before it had been steady for 60 s"),
        (0.0, 3, "the level was over before it had been steady for 0 s"),  # it never reached C=4
        (0.0, 4, "the server could not be traced: "),
    ],
)
def test_a_level_that_was_not_traced_says_why(tmp_path: Path, after_s: float, active: int, trouble: str) -> None:
    facts = traced(tmp_path, after_s=after_s, active=active)
    assert set(facts) <= set(NOTED)  # so that the verdict can be found again from the record
    assert str(facts["profile"]["trouble"]).startswith(trouble)  # type: ignore[index]


def test_a_level_without_a_wish_to_be_traced_has_nothing_to_say(tmp_path: Path) -> None:
    level = PlannedLevel(name="c4", mode="closed", concurrency=4, request_timeout_s=1, level_timeout_s=9)
    server = Launched(ENGINE, Server("simulated", "127.0.0.1", free_port()), None, tmp_path / "server.log", 0.0)
    with Profiler(server, level, tmp_path) as profiler:
        profiler.seen({"active": 4})
    assert profiler.facts == {}
    assert list(tmp_path.iterdir()) == []
