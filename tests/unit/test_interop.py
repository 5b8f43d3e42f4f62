"""Levels as other tools write them: their keys, their arithmetic (computed by themselves), and our provenance."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.cli import interop as verbs
from harness.errors import InputError
from harness.publish import interop
from harness.publish.interop import openmetrics, rows, sglang, vllm
from harness.publish.interop.measured import levels
from harness.run import store

FILES = Path(__file__).parents[1] / "files"
RUN = FILES / "runs" / "simulated"
# The script's own name for a figure, where its result file calls it otherwise.
RENAMED = {
    "total_input": "total_input_tokens",
    "total_output": "total_output_tokens",
    "total_input_text": "total_input_text_tokens",
    "total_input_vision": "total_input_vision_tokens",
}


def facts(name):
    return json.loads((FILES / "interop" / name).read_text())


@pytest.fixture(scope="module")
def speculative():
    [level] = levels(store.open_run(RUN), ["02-speculative/c2"])
    return level


@pytest.fixture(scope="module")
def plain():
    [level] = levels(store.open_run(RUN), ["01-baseline/c2"])
    return level


def test_an_export_for_vllm_has_the_keys_that_vllm_wrote_in_their_order_and_marks_ours(plain):
    written = list(vllm.export(plain))
    assert [key for key in written if not key.startswith("harness_")] == list(facts("vllm-0.32-chat.json"))
    assert [key for key in written if key.startswith("harness_")] == [
        "harness_run",
        "harness_cell_id",
        "harness_verdict",
        "harness_simulated",
    ]


def test_an_export_for_sglang_has_exactly_the_keys_that_sglang_wrote_in_their_order(plain):
    assert list(sglang.export(plain)) == list(facts("sglang-0.5.23-native.jsonl"))


@pytest.mark.parametrize(
    ("export", "name"), [(vllm.export, "vllm-0.32-chat.json"), (sglang.export, "sglang-0.5.23-native.jsonl")]
)
def test_what_an_export_knows_has_the_types_of_the_tools_own_file(plain, export, name):
    own, theirs = export(plain), facts(name)
    known = {key for key in theirs if own[key] is not None and theirs[key] is not None}
    assert len(known) > 40
    assert {key: type(own[key]) for key in known} == {key: type(theirs[key]) for key in known}
    lists = [key for key in known if isinstance(theirs[key], list)]
    assert {key: type(own[key][0]) for key in lists} == {key: type(theirs[key][0]) for key in lists}


def test_vllm_itself_computes_the_same_figures_from_the_same_requests(speculative):
    exported, computed = vllm.export(speculative), facts("computed-by-vllm-0.32.json")
    computed.pop("request_goodput")  # 0 where no objective was given; the file then says null
    for name, value in computed.items():
        assert exported[RENAMED.get(name, name)] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("dialect", ["sglang-oai-chat", "sglang"])
def test_sglang_itself_computes_the_same_figures_from_the_same_requests(speculative, dialect):
    native = speculative.arm.workload | {"dialect": {"sglang": "generate"}.get(dialect, "chat")}
    measured = levels(store.open_run(RUN), ["02-speculative/c2"])[0]
    object.__setattr__(measured, "arm", measured.arm.model_copy(update={"workload": native}))
    exported, computed = sglang.export(measured), facts("computed-by-sglang-0.5.23.json")[dialect]
    assert exported["backend"] == dialect
    retokenized = {name for name in computed if "retokenized" in name}
    unwritten = {"max_itl_ms"}
    for name in computed.keys() - retokenized - unwritten:
        assert exported[RENAMED.get(name, name)] == pytest.approx(computed[name], rel=1e-12), name


def test_speculation_is_told_as_vllm_tells_it_and_only_where_something_was_drafted(speculative, plain):
    # 654 drafts of 1962 tokens, 978 accepted: 978 / 1962 = 49.847 %, 1 + 978 / 654 = 2.4954.
    exported = vllm.export(speculative)
    assert exported["spec_decode_acceptance_rate"] == pytest.approx(49.847, abs=0.001)
    assert exported["spec_decode_acceptance_length"] == pytest.approx(2.4954, abs=0.0001)
    assert exported["spec_decode_num_drafts"] == 654
    assert not [key for key in vllm.export(plain) if key.startswith("spec_decode")]


def test_an_export_says_where_it_comes_from_and_that_it_was_simulated(plain):
    assert vllm.export(plain)["label"] == "harness simulated/01-baseline/c2, valid, simulated"
    assert vllm.export(plain)["harness_simulated"] == "true"
    assert sglang.export(plain)["tag"] == "harness simulated/01-baseline/c2, valid, simulated"


def test_failed_requests_keep_their_places_and_give_no_samples(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    path = run / "launches" / "01-baseline" / "levels" / "c2" / "requests.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    failed = max((record for record in records if record["phase"] == "measure"), key=lambda one: one["sent_s"])
    failed |= {"ok": False, "reason": "http", "detail": "500", "chunks": [], "output_tokens": None, "text": None}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    [level] = levels(store.open_run(run), ["01-baseline/c2"])
    exported = vllm.export(level)
    assert (exported["num_prompts"], exported["completed"], exported["failed"]) == (32, 31, 1)
    assert exported["total_output_tokens"] == 31 * 48
    last = {key: exported[key][-1] for key in ("output_lens", "ttfts", "itls", "latencies", "errors")}
    assert last == {"output_lens": 0, "ttfts": 0.0, "itls": [], "latencies": 0.0, "errors": "http: 500"}
    assert exported["errors"][:-1] == [""] * 31
    assert exported["mean_ttft_ms"] == pytest.approx(np.mean(exported["ttfts"][:-1]) * 1000)


def test_the_openmetrics_text_parses_and_says_what_the_levels_say():
    found = levels(store.open_run(RUN))
    families = {family.name: family for family in text_string_to_metric_families(openmetrics.text(found))}
    assert families["harness_level"].type == "info"
    ttft = families["harness_ttft_seconds"]
    assert ttft.type == "summary"
    stored = json.loads((RUN / "launches" / "02-speculative" / "levels" / "c2" / "level.json").read_text())
    samples = {
        (sample.name, sample.labels.get("quantile")): sample
        for sample in ttft.samples
        if (sample.labels["launch"], sample.labels["level"]) == ("02-speculative", "c2")
    }
    summary = stored["metrics"]["ttft_s"]
    assert samples["harness_ttft_seconds", "0.5"].value == summary["p50"]
    assert samples["harness_ttft_seconds_count", None].value == 32
    assert samples["harness_ttft_seconds_sum", None].value == pytest.approx(32 * summary["mean"])
    assert ("harness_ttft_seconds", "0.99") not in samples  # 32 samples support no p99
    # 2026-11-29T18:57:05.101Z
    assert float(samples["harness_ttft_seconds_count", None].timestamp) == pytest.approx(1795978625.101)
    rates = families["harness_output_tokens_per_second"].samples
    assert len(rates) == 10
    assert stored["throughput"]["output_tok_s"] in [sample.value for sample in rates]
    assert all(sample.labels["simulated"] == "true" for sample in rates)


def test_rows_have_the_same_keys_everywhere_and_the_metrics_of_the_level():
    found = list(rows.rows(levels(store.open_run(RUN))))
    assert {tuple(row) for row in found} == {tuple(found[0])}
    one = [row for row in found if (row["launch"], row["level"]) == ("02-speculative", "c2")]
    stored = json.loads((RUN / "launches" / "02-speculative" / "levels" / "c2" / "level.json").read_text())["metrics"]
    for name in ("ttft_s", "tpot_s", "tpot_naive_s", "e2e_s"):
        assert np.mean([row[name] for row in one]) == pytest.approx(stored[name]["mean"], rel=1e-9)
    assert sum(len(row["chunk_gaps_s"]) for row in one) == stored["chunk_gap_s"]["n"]
    assert [sum(row["chunk_tokens"]) for row in one] == [row["output_tokens"] for row in one]
    assert one[0]["sent_at"].startswith("2026-11-29T18:57:05.")


def test_levels_are_chosen_by_name_in_every_launch_or_in_one():
    run = store.open_run(RUN)
    assert [one.launch for one in levels(run, ["c4"])] == ["01-baseline", "02-speculative"]
    assert [(one.launch, one.name) for one in levels(run, ["01-baseline/c4"])] == [("01-baseline", "c4")]
    with pytest.raises(InputError) as caught:
        levels(run, ["c3"])
    assert "has no finished level `c3`" in str(caught.value)


@pytest.mark.parametrize("form", ["vllm", "sglang", "jsonl"])
def test_a_run_without_its_requests_is_refused_where_they_are_needed(tmp_path, form):
    run = tmp_path / "run"
    shutil.copytree(RUN, run, ignore=shutil.ignore_patterns("requests.jsonl"))
    found = levels(store.open_run(run), ["01-baseline/c2"])
    with pytest.raises(InputError) as caught:
        interop.export(found, form, tmp_path / "out")
    assert "no requests are stored of 01-baseline/c2" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert interop.export(found, "openmetrics", tmp_path / "out")


def test_the_command_line_offers_the_formats_that_there_are():
    assert verbs.EXPORTS == interop.EXPORTS
    assert verbs.IMPORTS == interop.IMPORTS
