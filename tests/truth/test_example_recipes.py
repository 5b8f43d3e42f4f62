"""The example recipes that can run here, run: as shipped, but for an address, and fewer and shorter requests."""

import shutil

import pytest
from campaign import ROOT
from servers import serving

from harness.cli import main
from harness.engines.simulated import ENGINE
from harness.run import answer, store

EXAMPLES = ROOT / "recipes" / "examples"


@pytest.fixture
def carry_out(tmp_path, monkeypatch):
    """A function that runs an example with some of its text replaced, and gives its run folder."""
    shutil.copytree(ROOT / "recipes" / "prompts", tmp_path / "recipes" / "prompts")
    shutil.copytree(EXAMPLES, tmp_path / "recipes" / "examples")
    monkeypatch.chdir(ROOT)  # whose environments they name

    def run(name, changes):
        for path in (tmp_path / "recipes" / "examples").glob("*.yaml"):
            text = path.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            path.write_text(text)
        words = ["run", str(tmp_path / "recipes" / "examples" / f"{name}.yaml"), "-q", "--out", str(tmp_path / "runs")]
        assert main(words) in {0, 1}
        [folder] = (tmp_path / "runs").iterdir()
        return store.open_run(folder)

    return run


@pytest.fixture
def server(tmp_path):
    """A simulated server that runs already: 5 ms a step, 0.5 ms for each running sequence."""
    args = {"step-ms": 5, "sequence-ms": 0.5, "max-running-requests": 8}
    with serving(ENGINE, tmp_path, model=None, args=args) as running:
        yield running


@pytest.mark.timeout(300)
def test_a_server_that_runs_already_is_measured_and_left_running(carry_out, server):
    changes = {
        "127.0.0.1:30000": f"127.0.0.1:{server.port}",
        "max_tokens: 128": "max_tokens: 32",
        "[1, 2, 5, 10]": "[1, 4], requests: 16",
    }
    run = carry_out("attach", changes)
    speeds = {result.level["concurrency"]: result.throughput.output_tok_s for _, result in run.levels()}
    # C / (a + k C): 1 / 5.5 ms and 4 / 7 ms.
    assert speeds == {1: pytest.approx(181.8, rel=0.15), 4: pytest.approx(571.4, rel=0.15)}
    assert server.ask("GET", "/health")[0] == 200
    assert run.launch("01-only")["engine"] == "simulated"


@pytest.mark.timeout(300)
def test_a_rate_that_a_server_cannot_follow_has_less_goodput_than_one_that_it_can(carry_out, server):
    """Eight at once, 64 tokens at 5 + 8 x 0.5 ms a step: 8 / 0.576 s = 13.9 requests a second; more than that queues.

    Of 40 that come within a second the first eight start at once, and nobody else before 0.5 s have gone.
    """
    changes = {
        "127.0.0.1:30000": f"127.0.0.1:{server.port}",
        "max_tokens: 128": "max_tokens: 64",
        "[1, 2, 4, 8]": "[6, 60]",
        "duration_s: 60": "requests: 40",
        "ttft_s: 0.5": "ttft_s: 0.25",
    }
    run = carry_out("rate-slo", changes)
    kept = {result.level["rate"]: result.throughput.goodput_requests_s for _, result in run.levels()}
    assert 3 < kept[6] < 8
    assert kept[60] < 13.9 / 2


@pytest.mark.timeout(600)
def test_two_settings_of_llamacpp_are_compared_on_its_own_model(carry_out, llamacpp_python):
    shorter = {"max_tokens: 32": "max_tokens: 8", "[1, 4], requests: 30": "[1], requests: 2"}
    run = carry_out(
        "llamacpp-cpu", shorter | {"warmup: {requests: 2}": "warmup: {requests: 1}", "launches: 2": "launches: 1"}
    )
    assert {result.ok for _, result in run.levels()} == {2}
    [found] = answer.across([run]).comparisons
    assert (found.base, found.treatment, len(found.rows)) == ("one-thread", "two-threads", 1)
    assert not found.simulated
    told = {launch.arm: run.launch(launch.name)["argv"] for launch in run.plan().launches}
    assert all(argv[argv.index("--threads") + 1] == count for argv, count in zip(told.values(), "12", strict=True))
