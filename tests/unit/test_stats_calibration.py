"""The promises of docs/verdicts.md, held by simulation: how often a table of verdicts is wrong, and what it finds."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def verdicts():
    spec = importlib.util.spec_from_file_location("verdicts", ROOT / "benchmarks" / "verdicts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["verdicts"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["verdicts"]


@pytest.fixture(scope="module")
def calibrated(verdicts):
    return {launches: verdicts.calibration(launches) for launches in (2, 3, 4, 8)}


def test_a_whole_table_of_identical_arms_makes_a_false_claim_in_five_percent_of_2000_experiments(verdicts, calibrated):
    low, high = verdicts.bounds_of(0.05)
    assert (round(low, 4), round(high, 4)) == (0.0405, 0.06)  # binomial(2000, 5 %): 81 to 120
    assert all(low <= found["table"] <= high for found in calibrated.values())


def test_the_interval_of_a_ratio_covers_the_truth_in_93_to_97_percent(calibrated):
    assert all(0.93 <= found["covered"] <= 0.97 for found in calibrated.values())


def test_testing_each_level_by_itself_or_a_plain_bootstrap_would_not_have_passed(calibrated):
    assert all(found["each"] > 0.15 and found["bootstrap"] > 0.3 for found in calibrated.values())


def test_compare_itself_makes_a_false_claim_in_five_percent_of_tables(verdicts):
    low, high = verdicts.bounds_of(0.05, 600)
    claims, _ = verdicts.whole_table(3, 600)
    assert low <= claims <= high


def test_four_launches_find_a_difference_of_five_percent(verdicts):
    assert verdicts.calibration(4, experiments=300, effect=0.0488)["power"] > 0.8


def test_a_crossover_at_a_known_concurrency_is_found_and_covered(verdicts):
    found = verdicts.crossover(4, experiments=120)
    low, _ = verdicts.bounds_of(0.95, 120)
    assert found["claimed"] > 0.95
    assert found["covered"] >= low
    assert found["width"] < 2


def test_refining_reaches_the_same_width_with_at_least_two_times_fewer_requests(verdicts):
    found = verdicts.refine(1.5, experiments=12)
    ratio = found["grid"]["requests"] / found["planner"]["requests"]
    assert ratio >= 2, found


def test_the_three_effects_of_a_two_by_two_are_covered(verdicts):
    low, _ = verdicts.bounds_of(0.95, 200)
    assert all(share >= low for share in verdicts.two_by_two(4, experiments=200).values())
