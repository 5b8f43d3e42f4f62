"""The names in the rules are names the engine knows: a misspelt flag would never fire, and nobody would notice."""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from locked_wheels import locked_wheel

from harness.env import rules
from harness.env.rules import When

FOLDER = Path(__file__).parents[2] / "envspecs/rules"


@pytest.fixture(scope="module")
def source() -> str:
    """All Python text of the sglang releases whose wheels are locked."""
    texts = []
    for spec in ("sglang-0.5.9-cu128", "sglang-cu130"):
        with zipfile.ZipFile(locked_wheel(spec, "sglang")) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("sglang/srt/") and name.endswith(".py")]
            texts += [wheel.read(name).decode() for name in names]
    return "\n".join(texts)


def parts(when: When) -> Iterator[When]:
    yield when
    for part in (*when.any, *when.none):
        yield from parts(part)


def conditions() -> list[When]:
    found = [rule.when for rule in rules.load_all(FOLDER) if rule.when.engine != "vllm"]
    return [part for when in found for part in parts(when)]


def test_every_sglang_flag_in_the_rules_is_a_flag_of_a_real_release(source: str) -> None:
    # A flag is an argparse literal or, in newer releases, an annotated field.
    flags = {name for when in conditions() for flag in when.args for name in flag.split("|")}
    words = {name for when in conditions() if when.formula for name in re.findall(r"[a-z_]{3,}", when.formula)}
    known = set(re.findall(r'"--([a-z][a-z0-9-]+)"', source)) | {
        name.replace("_", "-") for name in re.findall(r"^    ([a-z][a-z0-9_]+): ", source, re.MULTILINE)
    }

    assert {flag for flag in flags if flag not in known} == {"tp"}  # argparse completes `--tp` to `--tp-size`
    assert {word for word in words if word.replace("_", "-") not in known} == set()


def test_every_sglang_variable_in_the_rules_is_read_by_a_real_release(source: str) -> None:
    names = {name for when in conditions() for name in when.variables if name.startswith(("SGLANG_", "SGL_"))}

    assert names
    assert {name for name in names if name not in source} == set()


@pytest.mark.parametrize(
    "line",
    [
        "multicast operations are not supported",
        "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.",
        "Max running requests is reset to 48 for speculative decoding.",
        "Spec v2 currently only supports topk = 1 for speculative decoding.",
        " more than two PCIe-only GPUs",
        "FlashInfer PCIe-IPC all-reduce enabled",
        "no pcie_ipc_comm; falling back to NCCL all-reduce.",
        "speculative_num_draft_tokens is adjusted",
        "speculative_adaptive disabled",
        "set_eagle3_layers_to_capture",
    ],
)
def test_the_lines_the_rules_quote_are_in_the_releases(line: str, source: str) -> None:
    assert line in source
    quoted = " ".join(rule.message + rule.source + rule.remedy for rule in rules.load_all(FOLDER))
    assert line.strip().rstrip(".") in quoted
