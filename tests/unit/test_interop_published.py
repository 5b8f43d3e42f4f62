"""Other tools' results as references: their figures under our formulas' names, and the differences said."""

import json
from pathlib import Path

import pytest
from cli.conftest import Workplace, workplace  # noqa: F401

from harness.errors import InputError
from harness.publish import interop
from harness.publish.interop.told import positive
from harness.recipe import references

FILES = Path(__file__).parents[1] / "files"
PEERS = FILES / "interop"
RUN = FILES / "runs" / "simulated"


def imported(name, form):
    [told] = interop.read([PEERS / name], form)
    return told


def test_vllms_tpot_is_the_naive_one_and_its_itl_a_chunk_gap():
    told = imported("vllm-0.32-chat.json", "vllm")
    source = json.loads((PEERS / "vllm-0.32-chat.json").read_text())
    assert told.level["concurrency"] == 2
    assert told.level["output_tok_s"] == source["output_throughput"]
    # 6.663482804351193 ms, 15.261022999766283 ms, 28.66443099992466 ms in the file.
    assert told.level["tpot_naive_p50_s"] == pytest.approx(0.006663482804)
    assert told.level["chunk_gap_p50_s"] == pytest.approx(0.015261023)
    assert told.level["ttft_p50_s"] == pytest.approx(0.028664431)
    assert not [name for name in told.level if name.startswith(("tpot_mean", "tpot_p", "token_itl"))]
    assert any("`tpot_naive_s`" in line for line in told.differences)
    assert any("`chunk_gap_s`, never time per token" in line for line in told.differences)


def test_sglangs_itl_is_per_token_of_its_own_stream_and_per_chunk_of_openais():
    native = imported("sglang-0.5.23-native.jsonl", "sglang")
    chat = imported("sglang-0.5.23-chat.jsonl", "sglang")
    # 4.849739749715809 ms and 16.312746000039624 ms in the files.
    assert native.level["token_itl_p50_s"] == pytest.approx(0.00484973975)
    assert "chunk_gap_p50_s" not in native.level
    assert chat.level["chunk_gap_p50_s"] == pytest.approx(0.016312746)
    assert "token_itl_p50_s" not in chat.level
    assert (native.level["requests"], native.level["ok"]) == (8, 8)
    assert chat.level["requests"] is None  # without --output-details the file does not say how many were asked


def test_aiperfs_tokens_are_the_servers_where_it_counted_others():
    told = imported("aiperf-0.13.json", "aiperf")
    # The server's usage says 192 tokens in 0.736938496 s; aiperf's tokenizer made 491 of them, 654.8 tok/s.
    assert told.level["output_tok_s"] == pytest.approx(192 / 0.736938496)
    assert "counted 491 output tokens with its own tokenizer and the server 192" in told.differences[0]
    assert not [name for name in told.level if name.startswith("tpot")]
    assert told.level["chunk_gap_p50_s"] == pytest.approx(0.0162793045)
    assert told.level["e2e_p50_s"] == pytest.approx(0.165217036)


def test_aiperfs_itl_is_naive_unless_it_asked_for_usage_by_chunk(tmp_path):
    source = json.loads((PEERS / "aiperf-0.13.json").read_text())
    source["total_usage_completion_tokens"]["avg"] = source["total_output_tokens"]["avg"]
    for exact, name in ((False, "tpot_naive_p50_s"), (True, "tpot_p50_s")):
        source["input_config"]["endpoint"]["per_chunk_usage"] = exact
        path = tmp_path / f"{exact}.json"
        path.write_text(json.dumps(source))
        [told] = interop.read([path], "aiperf")
        assert told.level[name] == pytest.approx(0.0023048932832)
        assert told.level["output_tok_s"] == pytest.approx(654.8277246)


def test_guidellms_tpot_is_left_out_and_its_itl_is_the_naive_one():
    told = imported("guidellm-0.8.1.json", "guidellm")
    assert told.level["concurrency"] == 2
    assert told.level["output_tok_s"] == pytest.approx(192 / 0.7350578308)  # tokens over the benchmark's duration
    assert told.level["tpot_naive_p50_s"] == pytest.approx(0.005655817)
    assert told.level["ttft_p50_s"] == pytest.approx(0.023643017)
    assert told.level["e2e_p50_s"] == pytest.approx(0.153731346)
    assert any("its TPOT is E2E / n" in line for line in told.differences)


def test_a_rate_of_aiperf_is_an_open_loop_also_where_it_is_capped(tmp_path):
    source = json.loads((PEERS / "aiperf-0.13.json").read_text())
    source["input_config"]["phases"] = [
        {"kind": "warmup", "rate": 9.0},
        {"type": "poisson", "rate": 2.5, "concurrency": 4},
    ]
    (tmp_path / "one.json").write_text(json.dumps(source))
    [told] = interop.read([tmp_path / "one.json"], "aiperf")
    assert told.level["rate"] == 2.5
    assert "concurrency" not in told.level


@pytest.mark.parametrize(
    ("strategy", "level"),
    [
        ({"type_": "synchronous"}, {"concurrency": 1}),
        ({"type_": "throughput"}, {"saturation": True}),
        ({"type_": "poisson", "rate": 2.5}, {"rate": 2.5}),
    ],
)
def test_a_strategy_of_guidellm_is_a_level_of_ours(tmp_path, strategy, level):
    source = json.loads((PEERS / "guidellm-0.8.1.json").read_text())
    source["benchmarks"][0]["config"]["strategy"] = strategy
    (tmp_path / "one.json").write_text(json.dumps(source))
    [told] = interop.read([tmp_path / "one.json"], "guidellm")
    assert level.items() <= told.level.items()


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"max_concurrency": None, "request_rate": 4.0}, {"rate": 4.0}),
        ({"max_concurrency": None, "request_rate": "inf"}, {"saturation": True}),
    ],
)
def test_what_vllm_offered_without_a_concurrency(tmp_path, given, level):
    source = json.loads((PEERS / "vllm-0.32-chat.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(source | given))
    [told] = interop.read([tmp_path / "one.json"], "vllm")
    assert level.items() <= told.level.items()


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_what_was_exported_comes_back_as_the_levels_own_figures(workplace: Workplace, form: str) -> None:  # noqa: F811
    exported = workplace.harness("export", RUN, "--format", form, "-o", "out", "--json")
    assert exported.code == 0
    files = [name for name in exported.json["files"] if "02-speculative-" in name]
    assert len(files) == 5
    assert workplace.harness("import", *files, "--format", form, "--arm", "ours", "-o", "back.yaml").code == 0
    back = references.load(Path("back.yaml"))
    assert [level.concurrency for level in back.levels] == [1, 2, 4, 8, 16]
    for level in back.levels:
        stored = json.loads(
            (RUN / "launches" / "02-speculative" / "levels" / f"c{level.concurrency}" / "level.json").read_text()
        )
        metrics = stored["metrics"]
        assert level.ttft_mean_s == pytest.approx(metrics["ttft_s"]["mean"])
        assert level.tpot_naive_mean_s == pytest.approx(metrics["tpot_naive_s"]["mean"])
        assert level.tpot_mean_s is None
        assert level.chunk_gap_p50_s == pytest.approx(metrics["chunk_gap_s"]["p50"])
        assert level.e2e_mean_s == pytest.approx(metrics["e2e_s"]["mean"])
        assert level.acceptance_length == pytest.approx(stored["server"]["acceptance_length"])
        # The scripts divide by the time until the last stream ended; we until the last token.
        assert level.output_tok_s == pytest.approx(stored["throughput"]["output_tok_s_whole"], rel=0.001)
    assert "simulated" in back.method


def test_imports_of_two_tools_compare_and_say_that_they_were_not_measured_here(workplace: Workplace) -> None:  # noqa: F811
    for form, name in (("vllm", "vllm-0.32-chat.json"), ("guidellm", "guidellm-0.8.1.json")):
        said = workplace.harness("import", PEERS / name, "--format", form, "--hardware", "none", "-o", f"{form}.yaml")
        assert said.code == 0
    assert "its TPOT is E2E / n" in said.out
    compared = workplace.harness("compare", "vllm.yaml", "guidellm.yaml")
    assert "`vllm` is published, not measured here: vllm: vllm-0.32-chat.json" in compared.out
    assert "C=2" in compared.out


def test_everything_wrong_with_the_files_is_said_at_once(workplace: Workplace) -> None:  # noqa: F811
    source = json.loads((PEERS / "vllm-0.32-chat.json").read_text())
    for name, content in {
        "broken.json": "{",
        "other.json": "{}",
        "deep.json": "[" * 100_000,
        "list.json": "[1]",
        "empty.json": json.dumps(source | {"output_throughput": 0.0, "max_concurrency": 4}),
        "twice.json": json.dumps(source),
        "good.json": json.dumps(source),
    }.items():
        Path(name).write_text(content)
    names = (
        "good.json",
        "broken.json",
        "deep.json",
        "other.json",
        "list.json",
        "empty.json",
        "twice.json",
        "absent.json",
    )
    said = workplace.harness("import", *names, "--format", "vllm", "-o", "x.yaml")
    assert said.code == 2
    assert not Path("x.yaml").exists()
    for part in (
        "7 faults",
        "`broken.json`: neither JSON nor JSON lines",
        "`deep.json`: neither JSON nor JSON lines",
        "`other.json`: no `output_throughput`",
        "`list.json`: holds no JSON objects",
        "`empty.json`: cannot be a level of a reference: `output_tok_s`: Input should be greater than 0",
        "`twice.json`: level c2 is there twice, also in `good.json`",
        "`absent.json`: cannot read: No such file or directory",
    ):
        assert part in said.err, part


@pytest.mark.parametrize("form", interop.IMPORTS)
def test_a_part_of_another_shape_is_a_message_or_left_out_and_never_a_traceback(tmp_path: Path, form: str) -> None:
    [path] = [one for one in PEERS.glob(f"{form}*") if "chat.jsonl" not in one.name]
    source, bent, given = (
        json.loads(path.read_text()),
        tmp_path / "bent.json",
        {"reference": "x", "arm": "x", "source": "x"},
    )
    refused = 0
    for key in source:
        for value in ([], "x", 7, None, {"a": [1]}, float("nan")):
            bent.write_text(json.dumps(source | {key: value}))
            try:
                interop.as_reference(interop.read([bent], form), given)
            except InputError:
                refused += 1
    assert refused > 5


def test_a_reference_is_not_overwritten(workplace: Workplace) -> None:  # noqa: F811
    Path("mine.yaml").write_text("mine\n")
    said = workplace.harness("import", PEERS / "vllm-0.32-chat.json", "--format", "vllm", "-o", "mine.yaml")
    assert (said.code, Path("mine.yaml").read_text()) == (2, "mine\n")
    assert "exists already" in said.err


def test_only_numbers_above_zero_are_figures():
    assert [positive(value) for value in (1, 2.5, 0, -1, True, "3", None, float("nan"), float("inf"))] == [
        1.0,
        2.5,
        *[None] * 7,
    ]
