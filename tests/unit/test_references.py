"""Published tables load as arms that were not measured here, and say what can be concluded from them."""

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.recipe.references import compare_published, disagreements, is_reference, load, load_all
from harness.stats.compare import compare

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "references"


@pytest.fixture(scope="module")
def references():
    return {reference.reference: reference for reference in load_all(FOLDER)}


def test_every_file_is_named_for_its_reference(references):
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(references)
    assert len(references) == 8


def test_the_two_coding_prompt_references_conclude_what_their_data_allow(references):
    base, treatment = (references[f"{arm}-cu13-coding-prompts"].as_arm() for arm in ("baseline", "eagle3"))
    found = compare(base, treatment)
    assert found.summary == (
        "`baseline` better at every shared level 1 and saturation by point estimate, no crossover seen; 1 launch an "
        "arm, so no interval is possible"
    )
    assert found.crossover.state == "base everywhere"
    assert [(row.key, row.verdict) for row in found.rows] == [
        ("c1", "worse"),
        ("c2", "not comparable"),
        ("c5", "not comparable"),
        ("saturation", "worse"),
    ]
    assert all(row.estimate.interval is None for row in found.rows if row.estimate)
    assert found.saturation.ratio == pytest.approx(2.18, abs=0.005)  # 773 / 354
    assert (
        found.saturation.sentence
        == "`baseline` saturates at 773 tok/s, `eagle3` saturates at 354 tok/s: ratio 2.18, no interval"
    )
    assert found.policy.decision == "no-go"


def test_a_reference_says_that_it_was_not_measured_here(references):
    found = compare(*(references[f"{arm}-cu13-encyclopedic-prompts"].as_arm() for arm in ("baseline", "eagle3")))
    assert set(found.published) == {"baseline", "eagle3"}
    assert found.notes[0].startswith("`baseline` is published, not measured here: baseline-cu13-encyclopedic-prompts")
    assert found.saturation.ratio == pytest.approx(780 / 340.9)
    shared = [row.key for row in found.rows if row.verdict == "worse"]
    assert shared == ["c1", "c2", "c5"]


def test_the_serial_script_and_the_concurrent_one_disagree_about_the_speculating_server_only(references):
    found = {check.arm: check for check in disagreements(list(references.values()))}
    ratios = {
        name: (round(check.serial, 1), round(check.closed, 1)) for name, check in found.items() if not check.agree
    }
    assert sorted(ratios.values()) == [(96.1, 77.5), (96.1, 80.9)]
    assert sorted(round(check.ratio, 3) for check in found.values() if check.agree) == [0.999, 1.0]


def test_a_level_is_exactly_one_kind(tmp_path):
    path = tmp_path / "two.yaml"
    head = "".join(f"{key}: x\n" for key in ("reference", "arm", "server", "source", "hardware", "model", "method"))
    path.write_text(head + "levels:\n  - {concurrency: 1, serial: true, output_tok_s: 9.0}\n")
    with pytest.raises(InputError) as caught:
        load(path)
    assert "a level is exactly one of `concurrency`, `rate`, `serial: true` and `saturation: true`" in str(caught.value)
    assert f"{path}:9:" in str(caught.value)


def test_a_recipe_is_no_reference(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: x\n")
    assert not is_reference(recipe)
    assert not is_reference(tmp_path)
    assert is_reference(FOLDER / "eagle3-cu13-serial.yaml")


def test_comparing_references_brings_up_what_other_methods_said_of_their_servers():
    found = compare_published([FOLDER / f"{arm}-cu13-coding-prompts.yaml" for arm in ("baseline", "eagle3")])
    [comparison] = found.comparisons
    assert (comparison.base, comparison.treatment) == ("baseline", "eagle3")
    assert len([check for check in found.serial if check.agree is False]) == 2
    assert "eagle3-cu13-serial against eagle3-cu13-coding-prompts" in " ".join(check.message for check in found.serial)


def test_two_references_of_one_arm_go_by_their_own_names():
    paths = [FOLDER / f"eagle3-cu13-{prompts}-prompts.yaml" for prompts in ("coding", "encyclopedic")]
    [comparison] = compare_published(paths).comparisons
    assert (comparison.base, comparison.treatment) == ("eagle3-cu13-coding-prompts", "eagle3-cu13-encyclopedic-prompts")


def test_one_reference_is_nothing_to_compare():
    with pytest.raises(InputError, match="is one published arm: nothing to compare"):
        compare_published([FOLDER / "eagle3-cu13-serial.yaml"])
