"""An open loop that outruns its server, from recipe to exit code."""

from conftest import QUICK, Workplace


def test_a_rate_beyond_the_server_is_called_overload_and_ends_the_sweep(workplace: Workplace) -> None:
    """One request at a time, 8 tokens of 10 ms each: 12 a second leave, however many come."""
    text = QUICK.replace("{step-ms: 2, sequence-ms: 0.1}", "{step-ms: 10, sequence-ms: 0, max-running-requests: 1}")
    sweep = "rate: [6, 40, 80], requests: 40, stop_when_saturated: true"
    text = text.replace("concurrency: [1, 2], requests: 4", sweep)
    start = text.index("arms:")
    text = text[:start] + "arms: {only: {}}\n" + text[text.index("workload:") : text.index("compare:")]
    recipe = workplace.recipe(text + "timeouts: {start_s: 20, request_s: 60}\n")

    done = workplace.harness("run", recipe, "--json")

    assert done.out, done.err
    levels = {level["level"]["name"]: level for level in done.json["levels"]}
    assert list(levels) == ["r6", "r40"]
    reasons = {reason["code"]: reason["message"] for reason in levels["r40"]["verdict"]["reasons"]}
    assert "in-flight grows by" in reasons["overloaded"]
    assert "overloaded" not in {reason["code"] for reason in levels["r6"]["verdict"]["reasons"]}
    assert "higher levels are left out" in done.err
