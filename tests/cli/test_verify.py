"""`harness verify`: a stored run comes out again from its requests, and whatever was changed is named."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import QUICK, Workplace, carry_out

LEVEL = "launches/01-baseline/levels/c1/level.json"
REQUESTS = "launches/01-baseline/levels/c1/requests.jsonl"
UNPUBLISHED = QUICK.replace("publish: [{doc: docs/quick.md, block: quick}, logbook]\n", "")
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run; tests take copies of it."""
    root = tmp_path_factory.mktemp("measured")
    (root / "envspecs").mkdir()
    (root / "quick.yaml").write_text(UNPUBLISHED)
    carry_out(root)
    [run] = (root / "runs").iterdir()
    return run


@pytest.fixture
def run(measured: Path, workplace: Workplace) -> Path:
    """A copy that a test may spoil."""
    copy = workplace.root / "runs" / measured.name
    shutil.copytree(measured, copy)
    workplace.capture.readouterr()
    return copy


def change(path: Path, how: Change) -> None:
    """Edit a JSON file as somebody with an editor would."""
    value = json.loads(path.read_text())
    how(value)
    path.write_text(json.dumps(value))


def told(workplace: Workplace, run: Path) -> list[tuple[str, str]]:
    """File and key of everything that differs."""
    answer = workplace.harness("verify", run, "--json")
    assert answer.code == (1 if answer.json["differences"] else 0)
    return [(one["file"], one["key"]) for one in answer.json["differences"]]


def test_a_sentence_that_a_later_harness_words_otherwise_is_no_difference_and_an_edited_one_is(
    workplace: Workplace, run: Path
) -> None:
    path, ledger = run / "comparison.json", run / "digests.jsonl"
    as_it_was = path.read_bytes()
    answer = json.loads(as_it_was)
    answer["comparisons"][0]["notes"] = ["an older harness put it so"]
    path.write_text(json.dumps(answer))
    assert ("comparison.json", "sha256") in told(workplace, run)
    noted = [json.loads(line) for line in ledger.read_text().splitlines()]
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    for line in noted:
        if line["path"] == "comparison.json":
            line |= {"size": size, "sha256": sha256}  # as that harness noted it
    ledger.write_text("".join(json.dumps(line) + "\n" for line in noted))
    assert told(workplace, run) == []
    unchecked = workplace.harness("verify", run, "--json").json["unchecked"]
    assert "comparison.json: comparisons[0].notes: this harness says it in other words" in unchecked


def test_a_finished_run_comes_out_again_number_by_number(workplace: Workplace, run: Path) -> None:
    answer = workplace.harness("verify", run, "--json")
    assert (answer.code, answer.json["differences"], answer.json["unchecked"]) == (0, [], [])
    assert answer.json["levels"] == 4  # two arms at C=1 and C=2
    assert answer.json["numbers"] > 400
    # plan, inputs (recipe), facts twice, per launch launch.json and log, per level four files, and the plan's own.
    assert answer.json["digests"] > 20
    said = workplace.harness("verify", run)
    assert "all as stored" in said.out


@pytest.mark.parametrize(
    ("file", "how", "key"),
    [
        (LEVEL, lambda level: level["throughput"].update(output_tok_s=1e6), "throughput.output_tok_s"),
        (LEVEL, lambda level: level["throughput"].update(per_request_tok_s=None), "throughput.per_request_tok_s"),
        (LEVEL, lambda level: level["metrics"]["ttft_s"].update(mean=0.0001), "metrics.ttft_s.mean"),
        (LEVEL, lambda level: level["window"].update(end_s=9.0), "window.end_s"),
        (LEVEL, lambda level: level.update(output_tokens=33), "output_tokens"),
        (LEVEL, lambda level: level["verdict"].update(state="invalid"), "verdict.state"),
        (LEVEL, lambda level: level["server"].update(generated_tokens=7.0), "server.generated_tokens"),
        (LEVEL, lambda level: level.update(cell_id="0" * 64), "cell_id"),
        ("comparison.json", lambda found: found["comparisons"][0].update(summary="better"), "comparisons[0].summary"),
        (
            "comparison.json",
            lambda found: found["comparisons"][0]["rows"][1]["estimate"].update(ratio=2.0),
            "comparisons[0].rows[1].estimate.ratio",
        ),
        (
            "plan.json",
            lambda plan: plan["launches"][0]["cells"][0]["identity"]["workload"].update(max_tokens=9),
            "launches.01-baseline.cells.c1.cell_id",
        ),
        ("run.json", lambda state: state.update(plan="0" * 64), "plan"),
    ],
)
def test_a_changed_number_is_named_with_its_file_and_key(
    workplace: Workplace, run: Path, file: str, how: Change, key: str
) -> None:
    change(run / file, how)
    assert (file, key) in told(workplace, run)


def test_a_changed_request_shows_in_its_digest_and_in_every_number_made_from_it(
    workplace: Workplace, run: Path
) -> None:
    path = run / REQUESTS
    *others, last = path.read_text().splitlines()
    record = json.loads(last)
    assert record["phase"] == "measure"
    record["chunks"][-1][0] += 1.0  # its last token came a second later
    path.write_text("\n".join([*others, json.dumps(record)]) + "\n")
    found = told(workplace, run)
    assert (REQUESTS, "sha256") in found
    assert (LEVEL, "metrics.e2e_s.mean") in found
    assert (LEVEL, "throughput.output_tok_s_whole") in found


def test_a_request_left_out_changes_the_counts(workplace: Workplace, run: Path) -> None:
    path = run / REQUESTS
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    found = told(workplace, run)
    assert {(LEVEL, "requests"), (LEVEL, "ok"), (LEVEL, "output_tokens")} <= set(found)


def test_a_changed_text_no_longer_has_its_digest(workplace: Workplace, run: Path) -> None:
    path = run / REQUESTS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["text"] += " and more"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any("text_sha256" in key for _, key in told(workplace, run))


def test_a_changed_copy_of_the_recipe_is_not_what_was_planned(workplace: Workplace, run: Path) -> None:
    recipe = run / "inputs" / "recipes" / "quick.yaml"
    recipe.write_text(recipe.read_text() + "# later\n")
    assert told(workplace, run) == [("inputs/recipes/quick.yaml", "sha256"), ("plan.json", "recipe_sha256")]


def test_a_file_that_is_gone_is_named(workplace: Workplace, run: Path) -> None:
    (run / "launches" / "02-speculative" / "server.log").unlink()
    assert ("launches/02-speculative/server.log", "sha256") in told(workplace, run)


def test_a_file_that_does_not_read_is_a_difference_and_not_the_end(workplace: Workplace, run: Path) -> None:
    (run / LEVEL).write_text("{")
    found = told(workplace, run)
    assert ("launches/01-baseline/levels/c1", "contents") in found


def test_a_partial_run_is_checked_as_far_as_it_goes(workplace: Workplace, run: Path) -> None:
    """As a kill leaves it: one level without its result, one never begun, no comparison, a run that goes on."""
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**state, "state": "running"}))
    for answer_file in (run / "comparison.json", run / "policy-speculative.json"):
        answer_file.unlink()
    (run / "launches/02-speculative/levels/c1/level.json").unlink()
    shutil.rmtree(run / "launches/02-speculative/levels/c2")
    ledger = run / "digests.jsonl"
    gone = ("02-speculative/levels", '"comparison.json"', '"policy-', '"run.json"')
    kept = [line for line in ledger.read_text().splitlines() if not any(name in line for name in gone)]
    ledger.write_text("\n".join(kept) + "\n")
    answer = workplace.harness("verify", run, "--json")
    assert (answer.code, answer.json["differences"], answer.json["levels"]) == (0, [], 2)
    # Four measured requests, and one warm-up at the head of C=1.
    assert answer.json["unchecked"] == [
        "run.json: no line in digests.jsonl, in a run that is not done",
        "02-speculative c1: not finished, 5 requests noted",
        "02-speculative c2: not measured",
        "comparison.json: this run has none (it did not end, or measured too little)",
    ]


def test_a_run_of_an_older_harness_says_what_it_did_not_keep(workplace: Workplace, run: Path) -> None:
    (run / "digests.jsonl").unlink()
    change(run / "run.json", lambda state: state.pop("digests"))
    shutil.rmtree(run / "inputs")
    change(run / LEVEL, lambda level: level["metrics"]["ttft_s"].pop("minimum"))
    answer = workplace.harness("verify", run, "--json")
    assert (answer.code, answer.json["differences"]) == (0, [])
    assert answer.json["unchecked"][0].startswith("files: this run kept no digests.jsonl")
    assert any("no `metrics.ttft_s.minimum`" in text for text in answer.json["unchecked"])


# Against the plan


@pytest.mark.parametrize(
    ("file", "how", "key"),
    [
        ("launches/01-baseline/launch.json", lambda said: said.update(engine="vllm"), "engine"),
        ("launches/01-baseline/launch.json", lambda said: said.update(simulated=False), "simulated"),
        ("launches/01-baseline/launch.json", lambda said: said.update(arm="speculative"), "arm"),
        ("launches/01-baseline/launch.json", lambda said: said.update(block=3), "block"),
        ("launches/01-baseline/launch.json", lambda said: said.update(env_id="0" * 64), "env_id"),
        (LEVEL, lambda level: level.update(simulated=False), "simulated"),
        ("run.json", lambda state: state.update(recipe="another"), "recipe"),
    ],
)
def test_what_the_plan_decides_is_held_against_the_plan_even_with_its_digest_noted_anew(
    workplace: Workplace, run: Path, file: str, how: Change, key: str
) -> None:
    value = json.loads((run / file).read_text())
    how(value)
    note_anew(run, file, json.dumps(value))
    assert told(workplace, run) == [(file, key)]


def test_a_request_that_asked_for_more_than_was_planned_is_named(workplace: Workplace, run: Path) -> None:
    note_anew(run, REQUESTS, (run / REQUESTS).read_text().replace('"requested_tokens":8', '"requested_tokens":9', 1))
    assert told(workplace, run) == [(REQUESTS, "request 0 (warmup): requested_tokens")]


# Damage


def last_request(**changes: Any) -> Callable[[str], str]:
    """Changes the last line of a file of requests."""

    def edited(text: str) -> str:
        *others, last = text.splitlines()
        return "\n".join([*others, json.dumps({**json.loads(last), **changes})]) + "\n"

    return edited


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda text: "null\n" + text, "`{file}:1`: no request as the client wrote it"),
        (lambda text: text + "{}\n", "`{file}:6`: no request as the client wrote it"),
        (lambda text: text + "3\n", "`{file}:6`: no request as the client wrote it"),
        (last_request(chunks=[]), "`{file}:5`: no request as the client wrote it: `ok` without chunks"),
        (last_request(chunks=[["a", 1.0, 1, 0]]), "`{file}:5`: no request as the client wrote it: the time of a chunk"),
        (last_request(chunks=[[1.0, float("nan"), 1, 0]]), "`{file}:5`: no request as the client wrote it: the time"),
        (last_request(chunks=[[1.0, 1.0, "1", 0]]), "`{file}:5`: no request as the client wrote it: the tokens"),
        (last_request(chunks=[3]), "`{file}:5`: no request as the client wrote it"),
        (last_request(extra=[]), "`{file}:5`: no request as the client wrote it: `extra` is []"),
        (last_request(sent_s=None), "`{file}:5`: no request as the client wrote it: `sent_s` is None"),
        (last_request(new=1), "`{file}:5`: no request as the client wrote it"),
    ],
)
def test_a_damaged_request_is_named_with_its_line_and_the_other_levels_are_checked(
    workplace: Workplace, run: Path, how: Callable[[str], str], said: str
) -> None:
    (run / REQUESTS).write_text(how((run / REQUESTS).read_text()))
    answer = workplace.harness("verify", run, "--json")
    damaged = {one["file"]: one["stored"] for one in answer.json["differences"] if one["key"] == "contents"}
    assert said.format(file=Path("runs") / run.name / REQUESTS) in damaged["launches/01-baseline/levels/c1"].replace(
        f"{workplace.root}/", ""
    )
    assert (answer.code, answer.json["levels"]) == (1, 3)


READING = "launches/01-baseline/levels/c1/server_metrics.jsonl"


@pytest.mark.parametrize(
    ("file", "text", "place"),
    [
        (READING, "null\n", "launches/01-baseline/levels/c1"),
        (READING, "3\n", "launches/01-baseline/levels/c1"),
        (READING, '{"at": "x"}\n', "launches/01-baseline/levels/c1"),
        ("events.jsonl", "null\n", "events.jsonl:1"),
        ("events.jsonl", "3\n", "events.jsonl:1"),
        ("events.jsonl", '{"kind": "ended"}\n', "events.jsonl:1"),
        ("events.jsonl", '{"at": "x", "kind": "reused", "launch": []}\n3\n', "events.jsonl:2"),
        ("facts.json", "3", "comparison.json"),
        ("facts.json", '{"before": []}', "comparison.json"),
        ("facts.json", '{"before": {"gpu": {"devices": [3]}}}', "comparison.json"),
        ("facts.json", '{"before": {"cpu": {"governor": 3}}}', "comparison.json"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_breaks(
    workplace: Workplace, run: Path, file: str, text: str, place: str
) -> None:
    (run / file).write_text(text)
    assert place in {file for file, _ in told(workplace, run)}
    for words in (["show", run], ["compare", run]):
        assert workplace.harness(*words).code in {0, 1, 2}


@pytest.mark.parametrize(
    "how",
    [
        lambda level: level.update(started_at="x"),
        lambda level: level["level"].update(concurrency="2"),
        lambda level: level["level"].update(name="c7"),
        lambda level: level.update(launch="02-speculative"),
        lambda level: level.update(block=1),
        lambda level: level.update(arm="speculative"),
        lambda level: level["metrics"]["ttft_s"].update(mean=float("inf")),
    ],
)
def test_a_damaged_level_is_named_and_nothing_breaks(workplace: Workplace, run: Path, how: Change) -> None:
    change(run / LEVEL, how)
    found = told(workplace, run)
    assert (LEVEL, "sha256") in found
    assert {("launches/01-baseline/levels/c1", "contents"), (LEVEL, "block"), (LEVEL, "arm")} & set(found)
    for words in (["show", run], ["compare", run]):
        assert workplace.harness(*words).code in {0, 1, 2}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("launches/01-baseline/server.log", b"\xff2026-01-31T12:00:00.000000Z [1] text\n"),
        (REQUESTS, b"null\n"),
        (READING, b"3\n"),
        ("events.jsonl", b'{"at": "never", "kind": "ended"}\n'),
        ("facts.json", b"3"),
    ],
)
def test_a_report_of_a_damaged_run_is_written_all_the_same(
    workplace: Workplace, run: Path, file: str, line: bytes
) -> None:
    (run / file).write_bytes(line + (run / file).read_bytes())
    answer = workplace.harness("report", run)
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    "how",
    [
        lambda plan: plan["launches"][0].update(arm="nobody"),
        lambda plan: plan["compare"].update(base="nobody"),
        lambda plan: plan["launches"][0].update(name="../../.."),
        lambda plan: plan.update(launches=[]),
        lambda plan: plan.update(start_timeout_s=float("nan")),
        lambda plan: plan["launches"][0]["cells"][0]["identity"].update(x=float("inf")),
    ],
)
def test_a_plan_that_does_not_hold_together_is_an_input_error(workplace: Workplace, run: Path, how: Change) -> None:
    change(run / "plan.json", how)
    for words in (["verify", run], ["show", run], ["compare", run]):
        answer = workplace.harness(*words)
        assert (answer.code, "plan.json" in answer.err) == (2, True), answer


# The list of digests


def test_a_cell_that_was_edited_is_measured_again_and_never_reused(workplace: Workplace, run: Path) -> None:
    change(run / LEVEL, lambda level: level["throughput"].update(output_tok_s=1e6))
    requests = run / "launches/02-speculative/levels/c2/requests.jsonl"
    requests.write_text(requests.read_text().replace("0.0", "0.1", 1))
    recipe = workplace.recipe(UNPUBLISHED)
    planned = workplace.harness("plan", recipe, "--resume", run, "--json").json["cells"]
    fates = {(cell["launch"], cell["level"]): (cell["fate"], cell["why"]) for cell in planned}
    assert fates == {
        ("01-baseline", "c1"): ("stale", ["it was changed since it was measured: level.json"]),
        ("01-baseline", "c2"): ("reuse", []),
        ("02-speculative", "c1"): ("reuse", []),
        ("02-speculative", "c2"): ("stale", ["it was changed since it was measured: requests.jsonl"]),
    }


def test_a_cell_that_was_taken_over_is_held_against_what_its_run_had_noted(workplace: Workplace, run: Path) -> None:
    """Edited after it was taken over, with its line in the list of digests brought up to date."""
    recipe = workplace.recipe(UNPUBLISHED.replace("speculative-step-ms: 1", "speculative-step-ms: 2"))
    assert workplace.harness("run", recipe, "--resume", run, "--name", "second").code in {0, 1}
    second = run.parent / "second"
    assert told(workplace, second) == []
    note_anew(second, REQUESTS, (second / REQUESTS).read_text() + "\n")
    assert told(workplace, second) == [(REQUESTS, f"sha256 in `{run.name}`")]


def note_anew(run: Path, file: str, text: str) -> None:
    """Change a file, and its line in the list of digests with it."""
    (run / file).write_text(text)
    lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    lines = [{**line, "sha256": sha256, "size": len(text.encode())} if line["path"] == file else line for line in lines]
    (run / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "file",
    [
        "run.json",
        "plan.json",
        "facts.json",
        "launches/01-baseline/launch.json",
        LEVEL,
        REQUESTS,
        "comparison.json",
        "policy-speculative.json",
        "events.jsonl",
    ],
)
def test_a_finished_file_without_its_line_of_digests_is_named(workplace: Workplace, run: Path, file: str) -> None:
    ledger = run / "digests.jsonl"
    kept = [line for line in ledger.read_text().splitlines() if f'"path": "{file}"' not in line]
    assert len(kept) < len(ledger.read_text().splitlines())
    ledger.write_text("\n".join(kept) + "\n")
    assert told(workplace, run) == [(file, "sha256")]


def test_a_list_of_digests_that_is_gone_is_named(workplace: Workplace, run: Path) -> None:
    (run / "digests.jsonl").unlink()
    assert told(workplace, run) == [("digests.jsonl", "contents")]


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "3",
        '{"path": "plan.json", "size": [], "sha256": "0"}',
        '{"path": "../../../etc/passwd", "size": 1, "sha256": "0"}',
        '{"path": "/etc/passwd", "size": 1, "sha256": "0"}',
        '{"path": "plan.json", "size": 1, "sha256": "0", "at": "now"}',
    ],
)
def test_a_line_of_digests_that_no_harness_wrote_is_named(workplace: Workplace, run: Path, line: str) -> None:
    ledger = run / "digests.jsonl"
    ledger.write_text(line + "\n" + ledger.read_text())
    assert told(workplace, run) == [("digests.jsonl:1", "line")]


def test_a_list_of_digests_that_is_gone_from_a_record_is_named(workplace: Workplace, run: Path) -> None:
    records = workplace.root / "records"
    assert workplace.harness("publish", run, "--record", records).code == 0
    record = records / run.name
    assert told(workplace, record) == []
    (record / "digests.jsonl").unlink()
    assert told(workplace, record) == [("digests.jsonl", "contents")]


def test_a_damaged_state_is_named_and_the_levels_are_checked(workplace: Workplace, run: Path) -> None:
    (run / "run.json").write_text("3")
    assert told(workplace, run) == [("run.json", "sha256"), ("plan.json", "contents")]
    assert workplace.harness("verify", run, "--json").json["levels"] == 4


def test_an_event_that_was_edited_shows_and_one_that_came_later_does_not(workplace: Workplace, run: Path) -> None:
    events = run / "events.jsonl"
    text = events.read_text()
    events.write_text(text + json.dumps({"at": "2026-01-31T12:00:00+00:00", "kind": "launch"}) + "\n")
    assert told(workplace, run) == []
    events.write_text(text.replace("01-baseline", "01-another", 1))
    assert told(workplace, run) == [("events.jsonl", "sha256")]


def test_an_answer_made_anew_is_noted_anew(workplace: Workplace, run: Path) -> None:
    # Noted, withdrawn, noted again.
    recipe = workplace.recipe(UNPUBLISHED)
    for _ in range(2):
        assert workplace.harness("run", recipe, "--resume").code in {0, 1}
    again = next(path for path in run.parent.iterdir() if path != run)
    assert told(workplace, again) == []
    assert sum('"comparison.json"' in line for line in (again / "digests.jsonl").read_text().splitlines()) == 3


def test_an_answer_that_is_gone_from_a_finished_run_is_named(workplace: Workplace, run: Path) -> None:
    (run / "comparison.json").unlink()
    assert told(workplace, run) == [("comparison.json", "sha256"), ("comparison.json", "contents")]


def test_a_folder_that_is_no_run_is_an_input_error(workplace: Workplace) -> None:
    answer = workplace.harness("verify", "nowhere")
    assert (answer.code, "`nowhere` is not a run" in answer.err) == (2, True)
