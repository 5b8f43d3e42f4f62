"""Recipes' arguments for the simulated server and llama.cpp's launcher are checked before anything starts."""

import pytest

from harness.engines.flags import check, own


def faults(engine, **args):
    table = own.table(engine)
    named = {name.replace("_", "-"): value for name, value in args.items()}
    return [str(fault) for fault in check(table, named, lambda _: None)]


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("simulated", {"step_ms": 9.5, "speculative_tokens": 3, "fault": ["truncated"], "on_rank_loss": "hang"}),
        ("simulated", {"speculative_tiers": "1:4,8:0", "seed": 7}),
        ("llamacpp", {"threads": 1, "parallel": 8, "ctx_size": 8192, "metrics": True, "slots": True}),
        ("llamacpp", {"spec_type": ["ngram-simple", "ngram-mod"], "spec_synth_rates": [0.9, 0.8], "no_warmup": True}),
        ("llamacpp", {"model_draft": "x.gguf", "n_predict": 8, "metrics": False}),
    ],
)
def test_flags_that_the_programs_take_are_fine(engine, args):
    assert faults(engine, **args) == []


@pytest.mark.parametrize(
    ("engine", "args", "said"),
    [
        ("simulated", {"step_mss": 9.5}, "(did you mean `step-ms`?)"),
        ("simulated", {"step_ms": "fast"}, "`step-ms` must be a number, got `fast`"),
        ("simulated", {"speculative_tokens": 1.5}, "`speculative-tokens` must be a whole number, got `1.5`"),
        ("simulated", {"on_rank_loss": "cry"}, "`on-rank-loss` must be one of `die`, `hang`, got `cry`"),
        ("simulated", {"seed": [1, 2]}, "`seed` takes one value, got 2"),
        ("llamacpp", {"paralel": 8}, "(did you mean `parallel`?)"),
        ("llamacpp", {"metrics": 1}, "`metrics` takes no value, got `1`"),
        ("llamacpp", {"threads": True}, "`threads` needs a value"),
    ],
)
def test_flags_that_they_do_not_take_are_named_with_a_way_out(engine, args, said):
    (fault,) = faults(engine, **args)
    assert said in fault


def test_an_engine_that_is_not_ours_has_no_table_here():
    assert own.table("vllm") is None
