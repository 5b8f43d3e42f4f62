"""The prompt sets in the repository: what the generator writes, unique, varied, and without shared beginnings."""

import hashlib
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "prompts"
SETS = ("coding", "agentic", "encyclopedic")


def texts(name):
    return [json.loads(line)["text"] for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def test_the_files_are_what_the_generator_writes():
    checked = subprocess.run(
        [sys.executable, str(FOLDER / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    names = ["coding.jsonl", "agentic.jsonl", "encyclopedic.jsonl", "repeating.jsonl", "manifest.json"]
    assert checked.stdout.splitlines() == [f"{name}: as generated" for name in names]
    assert checked.returncode == 0


@pytest.mark.parametrize("name", SETS)
def test_the_manifest_has_each_files_digest_and_size(name):
    entry = json.loads((FOLDER / "manifest.json").read_text())[name]
    assert entry["sha256"] == hashlib.sha256((FOLDER / entry["file"]).read_bytes()).hexdigest()
    assert entry["prompts"] == len(texts(name)) == 256


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_unique_and_their_lengths_differ(name):
    found = texts(name)
    assert len(set(found)) == 256
    words = [len(text.split()) for text in found]
    assert max(words) > 10 * min(words)
    assert len(set(words)) > 40


@pytest.mark.parametrize("name", SETS)
def test_no_two_prompts_share_a_cache_block_of_beginning(name):
    # 16 tokens are about 64 characters of English: the smallest block that a prefix cache shares.
    found = sorted(texts(name))
    assert not [pair for pair in itertools.pairwise(found) if pair[0][:64] == pair[1][:64]]


@pytest.mark.parametrize("name", SETS)
def test_stretches_of_a_set_are_alike_so_that_levels_compare(name):
    words = [len(text.split()) for text in texts(name)]
    means = [statistics.mean(words[start : start + 32]) for start in range(0, 256, 32)]
    assert max(means) < 1.35 * min(means)
