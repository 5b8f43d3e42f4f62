"""From a plan to pieces, and from Slurm's words to what they mean: decisions that need no Slurm."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError, Interrupted, MeasurementError, ServerError
from harness.files import write_json
from harness.recipe.decide import decide
from harness.recipe.plan import Plan
from harness.recipe.site import Container, Site, Slurm
from harness.run import answer, node_agent, store
from harness.run.executors.slurm import follow, orders, queue, submit
from harness.run.executors.slurm.follow import Wishes
from harness.run.executors.slurm.orders import Job, Report
from harness.run.executors.slurm.pieces import Piece, Step, batches, divide
from harness.run.executors.slurm.queue import Seen, Unreachable
from harness.run.executors.slurm.states import Phase, hopeless, phase
from harness.run.node_agent import Place, split_cpus
from harness.run.store import Run

RECIPE = """\
recipe: quick
question: Does it help?
server: {engine: simulated}
arms:
  a: {}
  b: {server: {args: {step-ms: 3}}}
workload: {prompts: "synthetic:words=8,count=64", max_tokens: 8}
sweep: {concurrency: [1], requests: 4}
compare: {base: a, launches: 2}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envspecs").mkdir()
    monkeypatch.chdir(tmp_path)


def planned(*changes: tuple[str, str]) -> Plan:
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = Path("quick.yaml")
    path.write_text(text)
    return decide(path, Site(path))[1]


def everything(plan: Plan) -> list[str]:
    return [launch.name for launch in plan.launches]


def groups(plan: Plan) -> list[tuple[str, ...]]:
    return [piece.launches for piece in divide(plan, everything(plan), Slurm())]


# Pieces


def test_a_comparison_stays_on_the_same_nodes_in_the_plans_order() -> None:
    assert groups(planned()) == [("01-a", "02-b", "03-b", "04-a")]


def test_blocks_may_go_side_by_side_each_on_its_own_nodes() -> None:
    plan = planned(("launches: 2", "launches: 2, same_nodes: block"))
    assert groups(plan) == [("01-a", "02-b"), ("03-b", "04-a")]


def test_launches_fan_out_where_the_recipe_allows_it_or_compares_nothing() -> None:
    assert groups(planned(("launches: 2", "launches: 2, same_nodes: false"))) == [
        ("01-a",),
        ("02-b",),
        ("03-b",),
        ("04-a",),
    ]
    assert groups(planned(("compare: {base: a, launches: 2}\n", ""))) == [("01-a",), ("02-b",)]


def test_what_is_finished_is_no_part_of_a_piece() -> None:
    [piece] = divide(planned(), ["02-b", "04-a"], Slurm())
    assert piece.launches == ("02-b", "04-a")


@pytest.mark.parametrize(
    ("client", "nodes"),
    [("{}", 1), ("{node: separate}", 2), ("{node: separate, nodes: 3}", 4), ("{nodes: 3}", 3)],
)
def test_machines_for_the_load_are_asked_for_too(client: str, nodes: int) -> None:
    plan = planned(("sweep:", f"client: {client}\nsweep:"))
    assert {piece.nodes for piece in divide(plan, everything(plan), Slurm())} == {nodes}


def test_where_the_load_comes_from_and_who_shares_nodes_changes_no_cell() -> None:
    def cells(plan: Plan) -> list[str]:
        return [cell.cell_id for _, cell in plan.cells()]

    plain = cells(planned())
    assert cells(planned(("sweep:", "client: {node: separate, nodes: 2}\nsweep:"))) == plain
    assert cells(planned(("launches: 2", "launches: 2, same_nodes: false"))) == plain
    assert cells(planned(("engine: simulated", "engine: simulated, nodes: 2"))) != plain


def test_like_pieces_are_one_array() -> None:
    plan = planned(("launches: 2", "launches: 2, same_nodes: false"))
    [batch] = batches(divide(plan, everything(plan), Slurm()))
    assert len(batch.pieces) == 4


def test_no_array_is_longer_than_slurm_takes() -> None:
    """slurm.conf(5): MaxArraySize is 1001 by default, and the largest index one less."""
    piece = Piece((Step(("01-a",)),), 1, 0)
    assert [len(batch.pieces) for batch in batches([piece] * 2500)] == [1000, 1000, 500]


def test_the_throttle_is_for_all_arrays_of_a_run_together() -> None:
    plan = planned(("launches: 2", "launches: 2, same_nodes: false"), ("{args: {step-ms: 3}}", "{nodes: 2}"))
    site = Site(Path("none"), slurm=Slurm(parallel=4))
    scripts = submit.prepare(plan, everything(plan), site, Path("runs/one")).scripts
    assert ["%2\n" in script for script in scripts] == [True, True]


def test_an_arm_without_an_image_is_refused_where_servers_run_in_images() -> None:
    site = Slurm(container=Container(plugin="pyxis", images={"other": "x"}))
    with pytest.raises(InputError, match="has none for `a`"):
        divide(planned(), ["01-a"], site)


@pytest.mark.parametrize(
    ("nodes", "paired"),
    [(("n1", "n1", "n2", "n2"), True), (("n1", "n2", "n1", "n2"), False), (("n1",) * 4, True)],
)
def test_launches_are_paired_only_where_they_ran_on_the_same_machines(
    tmp_path: Path, nodes: tuple[str, ...], paired: bool
) -> None:
    run = store.create(tmp_path / "runs", planned(), name="one")
    for launch, node in zip(run.plan().launches, nodes, strict=True):
        run.write_launch(launch.name, {"node": {"name": node, "nodes": node}})
    assert answer._next_to_each_other(run, run.plan()) is paired


# States


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("PENDING", Phase.WAITING),
        ("REQUEUED", Phase.WAITING),  # ReFrame polled this one for ever
        ("COMPLETING", Phase.RUNNING),
        ("CANCELLED by 1000", Phase.ENDED),
        ("NODE_FAIL+", Phase.ENDED),
        ("OUT_OF_MEMORY", Phase.ENDED),
        ("SOMETHING_NEW", Phase.UNKNOWN),
        ("", Phase.UNKNOWN),
    ],
)
def test_states_are_understood_or_said_not_to_be(state: str, found: Phase) -> None:
    assert phase(state) is found


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("PartitionDown", True),
        ("(PartitionNodeLimit)", True),
        ("ReqNodeNotAvail, UnavailableNodes:n4", True),
        ("DependencyNeverSatisfied", True),
        ("Priority", False),
        ("Resources", False),
        ("JobArrayTaskLimit", False),
    ],
)
def test_reasons_that_only_a_person_can_end_are_known(reason: str, never: bool) -> None:
    assert hopeless(reason) is never


# The agent


@pytest.mark.parametrize(
    ("allowed", "wanted", "server", "client"),
    [
        (range(8), None, (0, 1, 2, 3, 4, 5), (6, 7)),
        (range(2), None, (0,), (1,)),
        ([3], None, (3,), (3,)),
        (range(4), 1, (0, 1, 2), (3,)),
        (range(2), 16, (0,), (1,)),
    ],
)
def test_the_client_never_gets_a_cpu_of_the_servers_where_there_are_two(
    allowed: Any, wanted: int | None, server: tuple[int, ...], client: tuple[int, ...]
) -> None:
    split = split_cpus(list(allowed), wanted)
    assert (split.server, split.client) == (server, client)
    assert split.shared is (len(list(allowed)) == 1)


def test_an_agent_reads_its_place_from_slurms_variables() -> None:
    place = Place.of(
        {
            "SLURM_JOB_ID": "17",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_PROCID": "1",
            "SLURMD_NODENAME": "n2",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_RESTART_COUNT": "1",
        }
    )
    assert place == Place("17", 3, 1, "n2", "n[1-2]", 1)


def test_an_agent_that_sees_another_folder_says_so_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "slurm" / "01"
    folder.mkdir(parents=True)
    (folder / "token").write_text("another")
    assert node_agent.main([str(tmp_path / "run"), "01", "0", "mine"]) == orders.NOT_SHARED
    assert "is not the folder that the job was submitted with" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["token"]


# Following


@pytest.fixture
def submitted(tmp_path: Path) -> Run:
    """A run with one job, 17, of which no agent was heard yet."""
    plan = planned(("compare: {base: a, launches: 2}\n", ""), ("  b: {server: {args: {step-ms: 3}}}\n", ""))
    run = store.create(tmp_path / "runs", plan, name="one")
    made = batches(divide(plan, everything(plan), Slurm()))
    orders.begin(run, "01", made, "token", {"variables": {}, "client_cpus": None, "grace_s": 60.0})
    orders.write_jobs(run, [Job(submission="01", number=0, name="harness:one", pieces=1, job_id="17")])
    return run


def say(run: Run, **facts: Any) -> None:
    report = Report(**{"host": "n1", "job": "17", "restarts": 0, "pid": 1, "at": "now", **facts})
    write_json(run.path / "slurm/01/reports/0-0-0.json", report.model_dump(mode="json"))


def answers(monkeypatch: pytest.MonkeyPatch, *told: Any) -> list[str]:
    """Slurm answers these states one after the other, the last one for ever; returns what is cancelled."""
    left, cancelled = list(told), list[str]()

    def look(ids: list[str]) -> list[Seen]:
        state = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(state, Exception):
            raise state
        state, _, reason = (state or "").partition(" ")
        return [Seen("17", 0, "17", state, reason, "n1")] if state else []

    monkeypatch.setattr(queue, "look", look)
    monkeypatch.setattr(queue, "remembered", lambda _: {})
    monkeypatch.setattr(queue, "cancel", cancelled.extend)
    return cancelled


QUICKLY = Slurm(poll_s=0.01, patience_s=0.1)


def followed(run: Run, *, cancel_hopeless: bool = False) -> tuple[Any, list[str]]:
    told: list[str] = []
    wishes = Wishes(threading.Event(), cancel_hopeless)
    tasks = follow.follow(run, QUICKLY, lambda kind, **facts: told.append(str(facts.get("text"))), wishes)
    return follow.problems(run, run.plan(), tasks), told


def test_a_job_that_slurm_may_have_taken_before_it_fell_silent_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    run = store.create(tmp_path / "runs", plan, name="one")
    monkeypatch.setattr(queue, "check_reachable", lambda: None)

    def lost(_: Path) -> str:
        raise Unreachable("Slurm's controller does not answer")

    monkeypatch.setattr(queue, "submit", lost)
    with pytest.raises(Unreachable):
        submit.submit(run, plan, everything(plan), Site(Path("none")))
    [job] = orders.jobs(run)
    assert (job.job_id, job.rejected) == (None, None)
    monkeypatch.setattr(queue, "named", {job.name: "18"}.get)
    assert [known.job_id for known in submit.identified(run)] == ["18"]
    assert [known.job_id for known in orders.jobs(run)] == ["18"]


def test_what_was_submitted_before_a_rejected_job_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(("launches: 2", "launches: 2, same_nodes: false"), ("{args: {step-ms: 3}}", "{nodes: 2}"))
    run = store.create(tmp_path / "runs", plan, name="one")
    answers_in_turn = ["18", InputError("Slurm does not take the job", details=["Requested node configuration"])]
    cancelled: list[str] = []

    def taken(_: Path) -> str:
        answer = answers_in_turn.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(queue, "check_reachable", lambda: None)
    monkeypatch.setattr(queue, "submit", taken)
    monkeypatch.setattr(queue, "cancel", cancelled.extend)
    with pytest.raises(InputError, match="does not take the job"):
        submit.submit(run, plan, everything(plan), Site(Path("none")))
    assert cancelled == ["18"]
    assert [job.rejected for job in orders.jobs(run)] == [None, "Requested node configuration"]


def test_a_state_that_nobody_understands_has_a_deadline(submitted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = answers(monkeypatch, "SOMETHING_NEW")
    began = time.monotonic()
    error, told = followed(submitted)
    assert time.monotonic() - began >= QUICKLY.patience_s
    assert "job 17 is `SOMETHING_NEW` for 0 s; it is given up" in told
    assert cancelled == ["17"]
    assert isinstance(error, Interrupted)


def test_a_job_that_vanished_has_a_deadline(submitted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "RUNNING", "")
    _, told = followed(submitted)
    assert "job 17 is `not in the queue any more` for 0 s; it is given up" in told


def test_a_controller_that_is_silent_is_given_up_after_a_while(submitted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, Unreachable("Slurm's controller does not answer"))
    with pytest.raises(ServerError, match="does not answer"):
        followed(submitted)


def test_a_job_whose_agent_is_not_heard_is_warned_of_and_left_alone(
    submitted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = answers(monkeypatch, *["RUNNING"] * 30, "COMPLETED")
    _, told = followed(submitted)
    [warned] = [text for text in told if text.startswith("warning: ")]
    assert "runs, but nothing of it is seen in the run folder: is its image still being fetched?" in warned
    assert cancelled == []


def test_a_job_that_the_queue_forgot_is_over_when_its_agent_said_so(
    submitted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(submitted, state="done", exit_code=0)
    answers(monkeypatch, "")
    assert followed(submitted) == (None, [])


def test_a_hopeless_job_is_warned_of_once_and_left_alone_unless_asked(
    submitted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = answers(monkeypatch, *["PENDING PartitionDown"] * 5, "COMPLETED")
    _, told = followed(submitted)
    assert sum("`PartitionDown` may last for ever" in text for text in told) == 1
    assert cancelled == []


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("NODE_FAIL", ServerError),
        ("PREEMPTED", ServerError),
        ("OUT_OF_MEMORY", ServerError),
        ("TIMEOUT", MeasurementError),
        ("CANCELLED", Interrupted),
    ],
)
def test_an_agent_that_could_not_say_why_is_spoken_for_by_slurm(
    submitted: Run, monkeypatch: pytest.MonkeyPatch, state: str, kind: type[Exception]
) -> None:
    say(submitted, state="running", launches=("01-a",))
    answers(monkeypatch, "RUNNING", state)
    error, _ = followed(submitted)
    assert type(error) is kind
    assert f"ended as {state} on n1" in str(error)
    assert "--resume" in str(error)


def test_an_agent_that_saw_another_folder_is_told_as_a_folder_that_is_not_shared(
    submitted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the log does lie on a shared file system, but the run does not: a cache, or an older copy."""
    (submitted.path / "slurm/01/logs/0-0.log").write_text(f"error: `/runs/one` on n4 {orders.ANOTHER_FOLDER}\n")
    answers(monkeypatch, "FAILED")
    error, _ = followed(submitted)
    assert isinstance(error, InputError)
    assert "left nothing in the run folder" in error.message
    assert "on a file system that all machines share?" in str(error.hint)


def test_an_agents_own_error_keeps_its_kind(submitted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"exit_code": 3, "message": "environment `x` is not built here", "hint": "run `harness build x`"}
    say(submitted, state="failed", **said)
    answers(monkeypatch, "FAILED")
    error, _ = followed(submitted)
    assert (error.exit_code, error.message) == (3, "environment `x` is not built here (job 17 on n1)")
    assert error.hint == "run `harness build x`"


def test_the_restart_of_a_job_is_not_its_end(submitted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    say(submitted, state="interrupted", exit_code=130, message="told to stop")
    answers(monkeypatch, "REQUEUED", "PENDING BeginTime", "SOMETHING_NEW")
    error, told = followed(submitted)
    assert "job 17 waits: BeginTime" in told
    assert isinstance(error, Interrupted)
