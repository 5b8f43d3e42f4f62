"""Adapters as values: argv, request bodies, what answers and log lines mean. Lines as real servers wrote them."""

import ast
import re
import sys
from pathlib import Path

import pytest

from harness import engines
from harness.engines import attach, llamacpp, llamacpp_server, openai, simulated
from harness.engines.argv import flags
from harness.engines.engine import Model, Observed, Sampling, Server
from harness.errors import InputError

SMOL = Model("/models/smol.gguf", "smollm2")
MEMBERS = ("name", "simulated", "needs_environment", "needs_model", "ready_path", "models_path", "metrics_path")
MEMBERS += ("effective_paths", "flush", "counters", "features", "signatures", "milestones", "stop")


@pytest.mark.parametrize("name", engines.NAMES)
def test_every_engine_is_found_by_its_name_and_has_all_its_members(name):
    engine = engines.get(name)
    assert engine.name == name
    assert all(hasattr(engine, member) for member in MEMBERS)
    for known in (*engine.signatures, *engine.milestones):
        re.compile(known.regex)


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="unknown engine `lamacpp`") as caught:
        engines.get("lamacpp")
    assert caught.value.hint == "did you mean `llamacpp`?"


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ("join", ["--a", "1", "--b", "--e", "x,2"]),
        ("repeat", ["--a", "1", "--b", "--e", "x", "--e", "2"]),
        ("spread", ["--a", "1", "--b", "--e", "x", "2"]),
    ],
)
def test_args_become_flags_in_their_order(lists, expected):
    args = {"a": 1, "b": True, "c": False, "d": None, "e": ["x", 2]}
    assert list(flags(args, lists=lists)) == expected


# -- requests --------------------------------------------------------------------------------------------------------


def test_a_chat_request_asks_for_usage_and_pins_the_sampling():
    path, body = openai.request("chat", "hello", Sampling(8, seed=7, top_p=0.9), "m")
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_fields_not_asked_for_are_not_sent():
    _, body = openai.request("completions", "hello", Sampling(8, ignore_eos=False), "m")
    assert body["prompt"] == "hello"
    assert not {"ignore_eos", "seed", "top_p"} & set(body)


def test_chat_messages_cannot_go_to_plain_completions():
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert openai.request("chat", conversation, Sampling(1), "m")[1]["messages"] == conversation
    with pytest.raises(InputError, match="cannot be sent as a plain completion"):
        openai.request("completions", conversation, Sampling(1), "m")


def test_llamacpp_counts_tokens_in_every_chunk_and_keeps_no_prompt():
    _, body = llamacpp.ENGINE.request("chat", "hello", Sampling(8), "m")
    assert (body["timings_per_token"], body["cache_prompt"]) == (True, False)
    with pytest.raises(InputError, match="dialect `generate`"):
        llamacpp.ENGINE.request("generate", "hello", Sampling(8), "m")


def test_the_simulated_engine_speaks_the_native_dialect_too():
    path, body = simulated.ENGINE.request("generate", "hello", Sampling(8, seed=3, top_p=0.5), "m")
    assert path == "/generate"
    assert body == {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, "top_p": 0.5, "seed": 3},
        "stream": True,
    }


# -- llama.cpp -------------------------------------------------------------------------------------------------------


def test_llamacpp_runs_our_launcher_in_the_environment():
    server = Server(
        "llamacpp", "127.0.0.1", 8101, SMOL, {"threads": 1, "spec-type": ["a", "b"]}, {"X": "1"}, "/e/python"
    )
    command = llamacpp.ENGINE.command(server)
    assert command.argv[:3] == ("/e/python", "-u", str(llamacpp.LAUNCHER))
    assert command.argv[3:] == (
        "--model", "/models/smol.gguf", "--alias", "smollm2", "--host", "127.0.0.1", "--port", "8101",
        "--metrics", "--slots", "--threads", "1", "--spec-type", "a,b",
    )  # fmt: skip
    assert command.variables == {"X": "1"}


@pytest.mark.parametrize(
    ("args", "program"), [({}, "llama-server"), ({"binary": "/opt/llama-server"}, "/opt/llama-server")]
)
def test_llamacpp_takes_the_binary_where_there_is_no_environment_or_the_recipe_says_so(args, program):
    argv = llamacpp.ENGINE.command(Server("llamacpp", "h", 1, SMOL, args)).argv
    assert argv[0] == program
    assert not any("binary" in word for word in argv[1:])


def test_a_recipe_may_switch_slots_and_metrics_off_and_does_not_get_them_twice():
    argv = llamacpp.ENGINE.command(Server("llamacpp", "h", 1, SMOL, {"slots": False, "metrics": True})).argv
    assert argv.count("--metrics") == 1
    assert "--slots" not in argv


# Lines of llama-server b11434 and of xllamacpp 2026.10.11549.
LOGS = {
    "bad flag": "error: invalid argument: --bogus-flag",
    "removed flag": 'error while handling argument "--draft-max": the argument has been removed. '
    "use --spec-draft-n-max or --spec-ngram-mod-n-max",
    "port in use": "E srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8101",
    "model not loaded": "E srv  llama_server: exiting due to model loading error",
    "model not found": "E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)\n"
    "E llama_model_load: error loading model: llama_model_loader: failed to load model from nope.gguf",
    "draft model not loaded": "E gguf_init_from_file: failed to open GGUF file 'n.gguf' (No such file or directory)\n"
    "E common_speculative_init_result: failed to load draft model, 'n.gguf'",
    "ended by a second signal": "Received second interrupt, terminating immediately.",
}


@pytest.mark.parametrize("name", LOGS)
def test_the_first_signature_that_matches_names_the_cause(name):
    assert next(each.name for each in llamacpp.ENGINE.signatures if re.search(each.regex, LOGS[name])) == name


def test_an_ordinary_start_matches_no_signature_and_every_milestone():
    log = [
        "0.00.006.923 I srv    load_model: loading model 'tiny.gguf'",
        "0.00.034.897 I common_speculative_init_result: loading draft model 'n05.gguf'",
        "0.00.050.759 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 2048, kv_unified = 'false'",
        "0.00.058.428 I srv          init: model loaded",
        "0.00.058.505 I srv          init: listening on http://127.0.0.1:18477",
        "0.03.005.661 I slot print_timing: id  1 | task 2 | draft acceptance = 0.75 (3 accepted / 4 generated)",
    ]
    assert not [each.name for each in llamacpp.ENGINE.signatures for line in log if re.search(each.regex, line)]
    reached = [[each.name for line in log if re.search(each.regex, line)] for each in llamacpp.ENGINE.milestones]
    assert all(reached)


DRAFTED, ACCEPTED = (f"llamacpp:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
SLOTS = [{"id": 0, "n_ctx": 2048, "speculative": True, "is_processing": False}]


@pytest.mark.parametrize(
    ("slots", "deltas", "engaged"),
    [
        (SLOTS, {DRAFTED: 40.0, ACCEPTED: 30.0}, True),
        (SLOTS, {DRAFTED: 0.0}, False),
        (SLOTS, {}, None),
        ([{**SLOTS[0], "speculative": False}], {}, False),
        (None, {}, None),
        (None, {DRAFTED: 40.0}, True),
        ("nonsense", {}, None),
    ],
)
def test_llamacpp_speculation_is_engaged_only_if_tokens_were_drafted(slots, deltas, engaged):
    observed = Observed({"/slots": slots}, "", deltas)
    assert llamacpp.ENGINE.evidence("speculation", observed).engaged is engaged


def test_a_feature_an_engine_does_not_have_is_unknown_and_said_so():
    for engine in (llamacpp.ENGINE, simulated.ENGINE):
        evidence = engine.evidence("telepathy", Observed())
        assert evidence.engaged is None
        assert evidence.lines == (f"{engine.name} has no feature `telepathy`",)


# -- the launcher ----------------------------------------------------------------------------------------------------


def test_the_launcher_needs_nothing_but_the_standard_library_and_xllamacpp():
    tree = ast.parse(Path(llamacpp_server.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported}
    assert roots - set(sys.stdlib_module_names) == {"xllamacpp"}


def test_launcher_flags_set_the_fields_they_name():
    chosen = llamacpp_server.settings(
        ["-m", "a.gguf", "-t", "3", "-np", "4", "--no-slots", "--spec-type", "ngram-simple,ngram-mod",
         "--spec-synth-rates", "0.9,0.5", "--alias", "a,b"]
    )  # fmt: skip
    assert chosen == {
        "hostnames": ["127.0.0.1"],
        "port": 8080,
        "n_gpu_layers": 0,
        "model.path": "a.gguf",
        "model_alias": {"a", "b"},
        "n_parallel": 4,
        "cpuparams.n_threads": 3,
        "cpuparams_batch.n_threads": 3,
        "endpoint_slots": False,
        "speculative.synth_rates": [0.9, 0.5],
        "speculative.types": ["ngram-simple", "ngram-mod"],
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-m", "a", "--bogus", "1"], "error: invalid argument: --bogus\n"),
        (["-m", "a", "--port", "x"], "error: argument --port: invalid int value: 'x'\n"),
        ([], "error: --model is required\n"),
        (["-m", "a", "--metric"], "error: invalid argument: --metric\n"),  # no abbreviations
    ],
)
def test_launcher_says_llama_servers_words_and_ends_with_1(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        llamacpp_server.settings(argv)
    assert caught.value.code == 1
    assert capsys.readouterr().err == said


# -- attach ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "engine"),
    [
        ({"/v1/models": {"data": [{"id": "tiny", "owned_by": "llamacpp"}]}}, "llamacpp"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}, "vllm"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}, "sglang"),
        ({"/server_info": {"simulated": True}, "/v1/models": {"data": []}}, "simulated"),
        ({"/props": {"total_slots": 4}, "/v1/models": {"data": [{"id": "renamed"}]}}, "llamacpp"),
        ({"/server_info": {"disaggregation_mode": "null"}}, "sglang"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "somebody"}]}}, None),
        ({"/v1/models": "<html>", "/props": None, "/server_info": ["?"]}, None),
        ({"/v1/models": {"data": ["m"]}}, None),
        ({}, None),
    ],
)
def test_a_running_server_is_recognised_by_its_answers(answers, engine):
    assert attach.detect(answers) == engine
    assert attach.recognised(answers).name == (engine or "attach")


def test_what_an_attached_server_does_not_say_is_unknown():
    assert attach.ENGINE.effective({}) == {"engine": "unknown", "models": "unknown"}
    named = {"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}
    assert attach.ENGINE.effective(named) == {"engine": "unknown", "models": "a, b"}
    assert attach.ENGINE.evidence("speculation", Observed()).engaged is None


def test_what_an_attached_server_says_is_read_as_its_engine_would():
    answers = {"/props": {"total_slots": 2}, "/slots": SLOTS}
    told = attach.ENGINE.effective(answers)
    assert (told["engine"], told["total_slots"], told["speculative"]) == ("llamacpp", 2, True)
    observed = Observed(answers, "", {DRAFTED: 0.0})
    assert attach.ENGINE.evidence("speculation", observed).engaged is False


def test_attach_starts_nothing():
    with pytest.raises(InputError, match="engine `attach` starts no server"):
        attach.ENGINE.command(Server("attach", "127.0.0.1", 8000))


def test_answers_flatten_to_scalars():
    nested = {"a": {"b": [1, {"c": None}]}, "d": "x", "e": object()}
    assert openai.flatten(nested) == {"a.b.0": 1, "a.b.1.c": None, "d": "x"}
    assert openai.flatten(7) == {}
    assert openai.model_names({"data": [{"id": "a"}, "junk"]}) == ("a",)
    assert openai.model_names("<html>") == ()
