"""A server that spans machines, here four ranks on one: real processes that know of each other by files alone."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import carriers, running, until

from harness.engines import get as engine_of
from harness.engines.engine import Server
from harness.errors import HarnessError, InputError, ServerError
from harness.recipe import plan as planning
from harness.recipe.expand import load
from harness.recipe.gather import gather
from harness.recipe.plan import Plan
from harness.recipe.site import Site
from harness.run import ledger, ports, ranks, rendezvous, store
from harness.run.diagnose import Diagnosis
from harness.run.executors import local
from harness.run.rendezvous import Follower, Head

RECIPE = """\
recipe: wide
question: do ranks find each other, and are they gone afterwards?
server:
  engine: simulated
  nodes: {nodes}
  args: {{step-ms: 4, {args}}}
workload: {{prompts: coding, max_tokens: 24}}
warmup: {{requests: 1, level_requests: 0}}
sweep: {{concurrency: [2], requests: {requests}}}
timeouts: {{start_s: {start_s}}}
client: {{{client}}}
on_failure: {on_failure}
"""
LAUNCH = "01-only"


class Group:
    """A run folder, and the other ranks' agents as processes of their own."""

    def __init__(self, folder: Path, nodes: int = 4, **recipe: Any) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / "r.yaml"
        defaults = {"args": "", "requests": 6, "start_s": 60, "on_failure": "stop", "client": "nodes: 1"}
        path.write_text(RECIPE.format(nodes=nodes, **defaults | recipe))
        expanded = load(path)
        site = Site(folder / "no-site.yaml")
        self.plan: Plan = planning.make(expanded, gather(expanded, site))
        self.run = store.create(folder / "runs", self.plan, name=f"wide-{os.getpid()}")
        self.nodes = nodes
        self.told: list[str] = []
        self.stop = threading.Event()
        self.job = local.Job(self.run, self.plan, site, self._tell, self.stop, node={"node": "here"})
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def _tell(self, kind: str, **facts: Any) -> None:
        self.told.append(f"{kind} {facts.get('text', '')}")

    def agent(self, rank: int) -> None:
        """Start the agent of one rank."""
        words = [sys.executable, "-m", "harness.run.ranks", str(self.run.path), LAUNCH, str(rank), str(self.nodes)]
        self.agents[rank] = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def measure(self) -> list[str]:
        """Rank 0's side, to its end."""
        launch = self.plan.launches[0]
        return local.carry_out(self.job, launch, launch.cells)

    def ended(self, rank: int) -> tuple[int, str]:
        """An agent's exit code and what it said."""
        _, said = self.agents[rank].communicate(timeout=60)
        return self.agents[rank].returncode, said

    def word(self, rank: int) -> dict[str, Any]:
        """What a rank last said."""
        path = self.run.launch_folder(LAUNCH) / "ranks" / f"rank-{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def when_measuring(self, act: Any) -> threading.Thread:
        """Act once the first level's requests are under way, beside the measuring."""
        requests = self.run.client_folder(LAUNCH, "c2")

        def wait() -> None:
            until((requests / "zero").exists, "the level to start")
            act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    made: list[Group] = []

    def make(nodes: int = 4, *, agents: bool = True, **recipe: Any) -> Group:
        made.append(found := Group(tmp_path, nodes, **recipe))
        for rank in range(1, nodes) if agents else ():
            found.agent(rank)
        return found

    yield make
    for one in made:
        for agent in one.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
            assert agent.stderr is not None
            agent.stderr.close()
        assert carriers(f"{one.run.run_id}/") == []


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_four_ranks_measure_a_level_and_every_one_is_verified_gone(group: Any) -> None:
    wide = group()
    assert wide.measure() == []
    assert [wide.ended(rank)[0] for rank in (1, 2, 3)] == [0, 0, 0]

    level = wide.run.level(LAUNCH, "c2")
    assert (level.verdict.state != "invalid", level.ok, level.output_tokens) == (True, 6, 6 * 24)

    record = wide.run.launch(LAUNCH)
    assert [told["rank"] for told in record["ranks"]] == [1, 2, 3]
    for told in record["ranks"]:
        assert told["argv"][-6:-1] == ["--nnodes", "4", "--node-rank", str(told["rank"]), "--dist-init-addr"]
        assert (wide.run.path / told["log"]).read_text().count(f"rank {told['rank']} of 4") == 1
    assert [(stop["rank"], stop["problems"]) for stop in record["stop"]["ranks"]] == [(1, []), (2, []), (3, [])]
    assert record["stop"]["ok"]
    meeting = {word["argv"][-1] for word in record["ranks"]}
    assert meeting == {f"{wide.word(0)['host']}:{wide.word(0)['port']}"}
    assert {told["log"] for told in record["ranks"]} <= set(ledger.noted(wide.run.path))


def test_the_load_of_a_server_on_two_machines_comes_from_both(group: Any) -> None:
    wide = group(nodes=2, client="nodes: 2, processes: 1")
    assert wide.measure() == []
    assert wide.ended(1)[0] == 0
    level = wide.run.level(LAUNCH, "c2")
    assert (level.ok, level.output_tokens, level.client["processes"]) == (6, 6 * 24, 2)
    assert [host["requests"] for host in level.client["hosts"]] == [3, 3]
    assert wide.run.launch(LAUNCH)["argv"][4] == "0.0.0.0"
    assert not (wide.run.launch_folder(LAUNCH) / "clients.json").exists()


def test_a_machine_without_a_server_offers_the_load(group: Any) -> None:
    apart = group(nodes=1, client="node: separate")
    apart.agent(1)
    assert apart.measure() == []
    assert apart.ended(1)[0] == 0
    level = apart.run.level(LAUNCH, "c2")
    assert (level.ok, len(level.client["hosts"])) == (6, 1)
    assert "ranks" not in apart.run.launch(LAUNCH)


def test_a_rank_that_dies_ends_the_level_as_invalid_and_is_named_with_its_own_last_lines(group: Any) -> None:
    wide = group(requests=400)
    thread = wide.when_measuring(lambda: kill(wide.word(2)["pid"]))
    with pytest.raises(ServerError, match=r"at c2: unknown \(ended by SIGKILL\) on rank 2 of 4") as caught:
        wide.measure()
    thread.join()
    assert any(line.startswith("rank 2: ") and "ready on http" in line for line in caught.value.details)
    assert f"that rank's log: {wide.run.launch_folder(LAUNCH)}/ranks/rank-2/server.log" in (caught.value.hint or "")
    level = wide.run.level(LAUNCH, "c2")
    assert level.verdict.state == "invalid"
    assert any("rank 2 of 4" in reason.message for reason in level.verdict.reasons)
    assert [wide.ended(rank)[0] for rank in (1, 2, 3)] == [5, 5, 5]
    assert wide.run.launch(LAUNCH)["stop"]["ok"]


def test_when_rank_0_dies_it_is_rank_0_that_is_named(group: Any) -> None:
    wide = group(nodes=3, requests=400)

    def kill_rank_0() -> None:
        mine = [
            pid for pid in carriers(f"{wide.run.run_id}/{LAUNCH}@{os.getpid()}.") if b"--node-rank\x000\x00" in cmd(pid)
        ]
        kill(mine[0])

    thread = wide.when_measuring(kill_rank_0)
    with pytest.raises(ServerError, match=r"unknown \(ended by SIGKILL\) on rank 0 of 3"):
        wide.measure()
    thread.join()
    assert [wide.ended(rank)[0] for rank in (1, 2)] == [5, 5]
    assert "rank lost" in wide.word(1)["diagnosis"]["name"]


def cmd(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_rank_that_never_comes_ends_the_start_at_its_deadline_by_name(group: Any) -> None:
    wide = group(agents=False, nodes=3, start_s=5)
    wide.agent(1)
    with pytest.raises(ServerError, match=r"did not start: rank 2 of 3 did not come within 5 s") as caught:
        wide.measure()
    assert "does it see the run's folder" in (caught.value.hint or "")
    assert wide.ended(1)[0] == 0


def test_a_rank_that_dies_while_it_starts_is_named_with_the_engines_own_signature(group: Any) -> None:
    fault = '"die-before-ready=torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"'
    wide = group(nodes=3, args=f"fault: [{fault}], fault-rank: 1")
    with pytest.raises(ServerError, match="did not start: CUDA out of memory on rank 1 of 3"):
        wide.measure()
    assert [wide.ended(rank)[0] for rank in (1, 2)] == [5, 0]


def test_a_rank_whose_machine_lacks_something_refuses_and_says_what(group: Any, tmp_path: Path) -> None:
    wide = group(nodes=2)
    follower_plan = wide.run.path / "plan.json"
    broken = json.loads(follower_plan.read_text())
    broken["arms"]["only"]["model"] = {"path": str(tmp_path / "gone.gguf"), "name": "m", "facts": {}}
    for rank, agent in wide.agents.items():
        agent.kill()
        agent.communicate()
        follower_plan.write_text(json.dumps(broken))
        wide.agent(rank)
    with pytest.raises(
        ServerError, match=rf"did not start: there is no model at `{tmp_path}/gone.gguf` on rank 1 of 2"
    ):
        wide.measure()
    assert wide.ended(1)[0] == InputError.exit_code


def test_a_meeting_port_that_is_lost_before_rank_0_listens_is_replaced_for_all(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rendezvous.ADDRESS, "127.0.0.1")
    wide = group(nodes=2)
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        first = squatter.getsockname()[1]
        offered = iter([first, rendezvous.free_ports("127.0.0.1", 1)])
        monkeypatch.setattr(rendezvous, "free_ports", lambda *_: next(offered))
        assert wide.measure() == []
    assert wide.word(0)["attempt"] == 2
    assert (
        wide.run.launch(LAUNCH)["ranks"][0]["argv"][-1] == f"127.0.0.1:{wide.word(0)['port']}" != f"127.0.0.1:{first}"
    )
    assert wide.ended(1)[0] in {0, ranks.LOST}  # its first part may have noticed before it was told


def test_a_server_that_is_started_anew_calls_its_ranks_again(group: Any) -> None:
    wide = group(nodes=2, requests=400, on_failure="skip-level")
    thread = wide.when_measuring(lambda: kill(wide.word(1)["pid"]))
    assert "on rank 1 of 2" in wide.measure()[0]
    thread.join()
    assert wide.ended(1)[0] == 5


def test_a_stopped_run_stops_every_rank(group: Any) -> None:
    wide = group(nodes=3, requests=4000)
    thread = wide.when_measuring(wide.stop.set)
    wide.measure()
    thread.join()
    assert [wide.ended(rank)[0] for rank in (1, 2)] == [0, 0]
    assert wide.run.level(LAUNCH, "c2") is None


def test_an_agent_that_is_told_to_stop_ends_its_rank_and_rank_0_hears_of_it(group: Any) -> None:
    wide = group(nodes=2, requests=4000)
    thread = wide.when_measuring(wide.agents[1].terminate)
    with pytest.raises(ServerError, match="stopped from outside on rank 1 of 2"):
        wide.measure()
    thread.join()
    assert "nothing left" in wide.ended(1)[1]


def test_a_rank_whose_rank_0_was_killed_stops_by_itself(group: Any, tmp_path: Path) -> None:
    wide = group(nodes=2, agents=False)
    with Head(wide.run.launch_folder(LAUNCH), 2) as head:
        result: list[int] = []
        serving = threading.Thread(
            target=lambda: result.append(ranks.serve(wide.run, wide.plan, LAUNCH, 1, 2, silent_s=3.0))
        )
        serving.start()
        server = Server("simulated", "127.0.0.1", ports.choose_port("127.0.0.1", None))
        head.call(engine_of("simulated"), server)
        until(lambda: wide.word(1).get("state") == "running", "rank 1 to start")
        pid = wide.word(1)["pid"]
        head._voice.end()  # as a harness that was killed: its beat stops, and nobody said anything
        serving.join(timeout=30)
        assert result == [ranks.LOST]
        assert not running(pid)


def test_ranks_on_one_machine_alone_are_refused_before_anything_starts(group: Any, tmp_path: Path) -> None:
    wide = group(nodes=2, agents=False)
    wide.job = replace(wide.job, node={})
    with pytest.raises(InputError, match="a server of `only` spans 2 machines, and this is one"):
        wide.measure()
    wide.job = replace(wide.job, plan=Group(tmp_path / "apart", 1, client="nodes: 2").plan)
    with pytest.raises(InputError, match="the load of `only` comes from other machines, and this is one"):
        wide.measure()
    assert not (wide.run.launch_folder(LAUNCH) / "ranks").exists()


# -- by files alone ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.05)
    monkeypatch.setattr(rendezvous, "_SETTLE_S", 0.3)
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.0)


def called(head: Head) -> None:
    head.call(engine_of("simulated"), Server("simulated", "127.0.0.1", 1))


def met(follower: Follower) -> None:
    until(follower.met, "rank 0's word")


def test_what_an_earlier_run_left_in_the_folder_is_not_taken_for_this_one(tmp_path: Path, quick: None) -> None:
    with Head(tmp_path, 2) as head, Follower(tmp_path, 1, 2) as old:
        met(old)
        old.running()
        old.dead(Diagnosis("long ago", (), ""))
    with Follower(tmp_path, 1, 2) as follower:
        assert not follower.met()  # `over` of the run before, and nobody beats
        with Head(tmp_path, 2) as head:
            assert head.absent() == [1]
            called(head)
            assert not head.lost()
            met(follower)
            assert follower.called() is not None
            until(lambda: head.absent() == [], "rank 1 to be heard")
        assert follower.over


def test_the_first_death_that_is_not_anothers_doing_is_the_cause(tmp_path: Path, quick: None) -> None:
    with Head(tmp_path, 4) as head, Follower(tmp_path, 1, 4) as one, Follower(tmp_path, 2, 4) as two:
        for follower in (one, two):
            met(follower)
        called(head)
        for follower in (one, two):
            assert follower.called() is not None
            follower.running()
        one.dead(Diagnosis("rank lost", ("peer gone",), "", of_a_peer=True))
        until(head.lost, "the loss")
        threading.Timer(0.1, lambda: two.dead(Diagnosis("CUDA out of memory", ("it said so",), "less"))).start()
        own = Diagnosis("rank lost", (), "", of_a_peer=True)
        cause = head.cause(own, "measure")
        assert cause is not None
        assert (cause.name, cause.evidence, cause.phase) == ("CUDA out of memory", ("rank 2: it said so",), "measure")
        assert cause.where.startswith("rank 2 of 4 (")
        assert head.cause(None, "measure") == cause  # whoever asks again hears the same


@pytest.mark.parametrize("rank_first", [True, False])
def test_of_two_deaths_of_their_own_the_one_seen_first_is_the_cause(
    tmp_path: Path, quick: None, rank_first: bool
) -> None:
    with Head(tmp_path, 2) as head, Follower(tmp_path, 1, 2) as follower:
        met(follower)
        called(head)
        assert follower.called() is not None
        follower.running()
        follower.dead(Diagnosis("ended by SIGKILL", (), ""))
        if rank_first:
            until(head.lost, "the loss")
        cause = head.cause(Diagnosis("a child process died", (), ""), "measure")
        assert cause is not None
        assert cause.name == ("ended by SIGKILL" if rank_first else "a child process died")


def test_a_rank_that_falls_silent_is_lost(tmp_path: Path, quick: None) -> None:
    with Head(tmp_path, 2, silent_s=0.5) as head, Follower(tmp_path, 1, 2) as follower:
        met(follower)
        called(head)
        until(lambda: head.absent() == [], "rank 1 to be heard")
        assert not head.lost()
        follower._voice.end()
        until(head.lost, "the silence to be noticed")
        cause = head.cause(None, "measure")
        assert cause is not None
        assert cause.name == "silent"


@pytest.mark.parametrize("first", ["refused", "called"])
def test_a_rank_that_refuses_answers_an_order_to_stop_whenever_it_comes(
    tmp_path: Path, quick: None, first: str
) -> None:
    with Head(tmp_path, 2) as head, Follower(tmp_path, 1, 2) as follower:
        met(follower)
        if first == "refused":
            follower.refused(InputError("no model here"))
        for attempt in (1, 2):
            called(head)
            assert follower.called() is not None
            follower.refused(InputError("no model here"))
            until(head.lost, "the refusal")
            head._voice.say(order="stop")
            follower.dismissed()
            assert [(stop.rank, stop.problems) for stop in head._stopped(5.0)] == [(1, ())], attempt


def test_a_rank_that_does_not_report_its_stop_is_what_remains(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_STOP_EXTRA_S", 0.3)
    with Head(tmp_path, 2) as head, Follower(tmp_path, 1, 2) as follower:
        met(follower)
        called(head)
        follower.called()
        follower.running()
        until(lambda: head.absent() == [], "rank 1 to be heard")
        stopped = head._stopped(0.3)
    assert stopped[0].problems == ("it did not report a clean stop within 0 s",)


def test_a_port_that_somebody_holds_on_any_address_is_not_met_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as squatter:
        taken = squatter.getsockname()[1]
        offered = iter([taken, taken - 1, ports.choose_port("127.0.0.1", None)])
        monkeypatch.setattr(ports, "choose_port", lambda *_: next(offered))
        assert rendezvous.free_ports("127.0.0.1", 2) not in {taken, taken - 1}


def test_an_address_is_what_the_machine_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.ADDRESS, "127.0.1.3")
    assert rendezvous.address() == "127.0.1.3"
    monkeypatch.setenv(rendezvous.ADDRESS, "lo")
    assert rendezvous.address() == "127.0.0.1"
    monkeypatch.delenv(rendezvous.ADDRESS)
    assert ports.is_free(rendezvous.address(), 0)


def test_an_agent_that_never_hears_rank_0_gives_up(group: Any) -> None:
    wide = group(nodes=2, agents=False, start_s=1)
    began = time.monotonic()
    assert ranks.serve(wide.run, wide.plan, LAUNCH, 1, 2) == ranks.LOST
    assert time.monotonic() - began >= 1.0


def test_a_bad_rank_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks.main([str(tmp_path), LAUNCH, "1", "2"]) == HarnessError.exit_code
    assert "is not a run" in capsys.readouterr().err
