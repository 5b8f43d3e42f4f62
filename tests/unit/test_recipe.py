"""Recipes: inheritance, arms, matrix, the plan and the identity of its cells."""

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.recipe import findings, identity, plan, where
from harness.recipe.expand import Expanded, load
from harness.recipe.plan import Found, PromptFacts
from harness.recipe.schema import Compare

BASE = """\
recipe: small
question: does it help?
server:
  engine: simulated
  args: {step-a-ms: 8, gone: 1}
arms:
  baseline: {}
  spec:
    server:
      args: {spec-draft-tokens: 3, gone: null}
workload: {prompts: coding, max_tokens: 16}
sweep: {concurrency: [4, 1]}
compare: {base: baseline, launches: 2}
"""
FOUND = Found(prompts={"coding": PromptFacts("ab" * 32, 256)}, measurement="1", recipe_sha256="cd" * 32)


def written(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def loaded(folder: Path, text: str = BASE) -> Expanded:
    return load(written(folder, text))


def message(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        plan.make(loaded(folder, text), FOUND)
    return str(caught.value).replace(f"{folder}/", "")


def test_an_arm_is_the_recipe_with_its_own_values_laid_over(tmp_path: Path) -> None:
    expanded = loaded(tmp_path)
    assert expanded.arm("baseline").setup.server.args == {"step-a-ms": 8, "gone": 1}
    assert expanded.arm("spec").setup.server.args == {"step-a-ms": 8, "spec-draft-tokens": 3}
    assert expanded.arm("spec").overrides == ("server.args.gone", "server.args.spec-draft-tokens")
    assert str(expanded.arm("spec").place("server", "args", "spec-draft-tokens")).endswith("r.yaml:10:14")


def test_extends_lays_a_recipe_over_another_and_keeps_where_values_came_from(tmp_path: Path) -> None:
    written(tmp_path, BASE, "base.yaml")
    expanded = loaded(tmp_path, "extends: base.yaml\nrecipe: child\nworkload: {max_tokens: 32}\n")
    assert expanded.recipe.recipe == "child"
    assert expanded.arm("spec").setup.workload.max_tokens == 32
    assert str(expanded.arm("spec").place("server", "engine")).endswith("base.yaml:4:3")


def test_extends_in_a_circle_or_to_nothing_is_refused_with_its_line(tmp_path: Path) -> None:
    written(tmp_path, "extends: b.yaml\nrecipe: a\n", "a.yaml")
    written(tmp_path, "extends: a.yaml\nrecipe: b\n", "b.yaml")
    with pytest.raises(InputError, match=r"`extends` goes in a circle"):
        load(tmp_path / "a.yaml")
    assert message(tmp_path, "extends: c.yaml\nrecipe: x\n").startswith("r.yaml:1:1: there is no `c.yaml`")


def test_a_matrix_makes_an_arm_of_every_combination_that_is_not_excluded(tmp_path: Path) -> None:
    text = BASE.replace("base: baseline", 'base: "baseline,a=1,b=2"') + (
        "matrix: {server.args.a: [1, 2], server.args.b: [1, 2]}\nexclude: [{server.args.a: 2, server.args.b: 2}]\n"
    )
    names = [arm.name for arm in loaded(tmp_path, text).arms]
    assert names == [f"{arm},a={a},b={b}" for arm in ("baseline", "spec") for a, b in ((1, 1), (1, 2), (2, 1))]


def test_zip_takes_values_side_by_side(tmp_path: Path) -> None:
    text = BASE.replace(
        "compare: {base: baseline, launches: 2}\n", "zip: {server.args.a: [1, 2], server.args.b: [8, 9]}\n"
    )
    arms = loaded(tmp_path, text).arms
    assert [(arm.setup.server.args["a"], arm.setup.server.args["b"]) for arm in arms] == [(1, 8), (2, 9)] * 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("max_tokens: 16", "max_tokns: 16"), "unknown key `workload.max_tokns`"),
        (("concurrency: [4, 1]", "concurrency: [4, 0]"), "`sweep.concurrency[1]`: must be at least 1, got `0`"),
        (("concurrency: [4, 1]", "concurrency: []"), "r.yaml:12:9: `sweep.concurrency`: must not be empty"),
        (("concurrency: [4, 1]", "concurrency: [4, 4]"), "`concurrency` names a level twice"),
        (("concurrency: [4, 1]", "requests: 3"), "no level: give `concurrency`, `rate` or `serial`"),
        (("max_tokens: 16", "max_tokens: many"), '`workload.max_tokens`: must be a valid integer, got `"many"`'),
        (("base: baseline", "base: basline"), "`compare.base` names no arm: `basline`"),
        (("  baseline: {}", "  baseline: {sweep: 1}"), "an arm cannot set `sweep`"),
        (("args: {spec-draft", "argz: {spec-draft"), "r.yaml:10:7: unknown key `server.argz`"),
        (("launches: 2", "launches: 2, treatment: [workload.*]"), "arm `spec` sets `server.args.gone`, which"),
        (("compare: {", "expect: {spek: [speculation]}\ncompare: {"), "`expect` names no arm: `spek`"),
        (
            ("compare: {", "timeouts: {request_s: 9, level_s: 5}\ncompare: {"),
            "(9 s) must be shorter than `level_s` (5 s)",
        ),
    ],
)
def test_a_recipe_with_a_fault_says_which_and_where(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert change[0] in BASE
    assert expected in message(tmp_path, BASE.replace(*change))


def test_levels_run_ascending_with_the_default_number_of_requests(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path), FOUND)
    # max(30, 4 * C): 30 for C=1 and C=4.
    assert [(cell.level.name, cell.level.requests) for _, cell in made.cells()][:2] == [("c1", 30), ("c4", 30)]


def test_arms_are_interleaved_a_b_b_a() -> None:
    how = Compare(base="a", launches=4)
    assert plan.blocks(["a", "b"], how) == [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    drawn = plan.blocks(["a", "b"], Compare(base="a", launches=20, order="random", seed=1))
    assert all(sorted(block) == ["a", "b"] for block in drawn)
    assert len({tuple(block) for block in drawn}) == 2


def test_no_level_of_a_launch_gets_the_prompts_of_another(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path, BASE.replace("[4, 1]", "[1, 2, 4]")), FOUND)
    for launch in made.launches:
        slices = [range(cell.first_prompt, cell.first_prompt + cell.prompts) for cell in launch.cells]
        slices.append(range(launch.first_prompt, launch.first_prompt + launch.warmup_requests))
        used = [index for part in slices for index in part]
        assert len(used) == len(set(used))


def test_both_arms_of_a_block_get_the_same_prompts(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path), FOUND)
    firsts = {(launch.block, launch.arm): [cell.first_prompt for cell in launch.cells] for launch in made.launches}
    assert firsts[0, "baseline"] == firsts[0, "spec"] != firsts[1, "spec"]


def test_a_prompt_set_that_is_too_small_is_reported_in_the_plan(tmp_path: Path) -> None:
    small = Found(prompts={"coding": PromptFacts("ab" * 32, 40)}, measurement="1")
    made = plan.make(loaded(tmp_path), small)
    assert [finding.id for finding in made.findings] == ["prompts-wrap"]
    assert plan.make(loaded(tmp_path), FOUND).findings == ()


def test_the_same_recipe_gives_the_same_plan_and_cells(tmp_path: Path) -> None:
    one, other = plan.make(loaded(tmp_path), FOUND), plan.make(loaded(tmp_path), FOUND)
    assert one.digest == other.digest
    cells = [cell.cell_id for _, cell in one.cells()]
    assert cells == [cell.cell_id for _, cell in other.cells()]
    assert len(set(cells)) == len(cells)


def test_what_moves_numbers_moves_the_cell_and_says_what_changed(tmp_path: Path) -> None:
    before = plan.make(loaded(tmp_path), FOUND).launches[0].cells[0]
    after = plan.make(loaded(tmp_path, BASE.replace("max_tokens: 16", "max_tokens: 32")), FOUND).launches[0].cells[0]
    assert before.cell_id != after.cell_id
    assert identity.changes(before.identity, after.identity) == ["workload.max_tokens changed from 16 to 32"]


def test_deadlines_and_ports_are_no_part_of_a_cell(tmp_path: Path) -> None:
    before = plan.make(loaded(tmp_path), FOUND)
    text = BASE.replace("  engine: simulated", "  engine: simulated\n  port: 8123") + "timeouts: {request_s: 7}\n"
    after = plan.make(loaded(tmp_path, text), FOUND)
    assert before.launches[0].cells[0].cell_id == after.launches[0].cells[0].cell_id


def test_a_plan_survives_its_json(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path), FOUND)
    again = plan.Plan.model_validate_json(made.model_dump_json())
    assert again == made
    assert again.digest == made.digest


def test_running_the_base_against_itself_is_planned_as_two_equal_arms(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path, BASE.replace("launches: 2", "launches: 1, aa: true")), FOUND)
    assert list(made.arms) == ["baseline", "baseline-again"]
    assert [launch.arm for launch in made.launches] == ["baseline", "baseline-again"]


def test_a_refined_plan_begins_with_every_second_level_and_grows_by_blocks(tmp_path: Path) -> None:
    text = BASE.replace("[4, 1]", "[1, 2, 4, 8]").replace("launches: 2", "launches: 1") + "refine: {width: 1.3}\n"
    expanded = loaded(tmp_path, text)
    first = plan.make(expanded, FOUND)
    assert [cell.level.name for cell in first.launches[0].cells] == ["c1", "c4", "c8"]
    grown = plan.extend(first, expanded, FOUND, [3, 6], "near 4")
    assert [launch.arm for launch in grown.launches] == ["baseline", "spec", "spec", "baseline"]  # A B B A
    assert [cell.level.name for cell in grown.launches[2].cells] == ["c3", "c6"]
    assert grown.digest == first.digest  # still the same plan, so that a killed run can go on
    used = [range(cell.first_prompt, cell.first_prompt + cell.prompts) for _, cell in grown.cells()]
    assert max(used[0]) < min(used[-1])


def test_refine_needs_two_arms_and_a_grid(tmp_path: Path) -> None:
    said = message(tmp_path, BASE + "refine: {}\n")
    assert "needs a grid of at least three concurrencies" in said


def test_objectives_of_goodput_are_planned_for_every_level_and_change_no_cell(tmp_path: Path) -> None:
    asked = BASE.replace("[4, 1]", "[4, 1], goodput: {ttft_s: 0.5, tpot_s: 0.05}")
    made, plain = (plan.make(loaded(tmp_path, text), FOUND) for text in (asked, BASE))
    assert {str(cell.level.goodput) for _, cell in made.cells()} == {"{'ttft_s': 0.5, 'tpot_s': 0.05}"}
    assert [cell.cell_id for _, cell in made.cells()] == [cell.cell_id for _, cell in plain.cells()]
    assert "no objective: give `ttft_s`, `tpot_s` or `e2e_s`" in message(
        tmp_path, BASE.replace("[4, 1]", "[4, 1], goodput: {}")
    )


@pytest.mark.parametrize("url", ["ftp://h:1", "http://h:1/v1", "h:8000", "http://"])
def test_where_a_running_server_is_must_be_an_address_alone(tmp_path: Path, url: str) -> None:
    assert "server.url" in message(tmp_path, BASE.replace("engine: simulated", f"engine: attach\n  url: {url}"))


GRID = BASE.replace(
    "      args: {spec-draft-tokens: 3, gone: null}\n",
    "      args: {spec-draft-tokens: 3}\n"
    "    matrix: {server.args.spec-steps: [2, 3], server.args.spec-top-k: [1, 4]}\n"
    "    exclude: [{server.args.spec-steps: 3, server.args.spec-top-k: 4}]\n",
)


def test_an_arm_with_a_grid_of_its_own_leaves_the_other_arms_alone(tmp_path: Path) -> None:
    expanded = loaded(tmp_path, GRID + "expect: {spec: [speculation]}\n")
    # The words that both flags begin with, `spec`, tell nothing apart.
    assert [arm.name for arm in expanded.arms] == [
        "baseline", "spec,steps=2,top-k=1", "spec,steps=2,top-k=4", "spec,steps=3,top-k=1",
    ]  # fmt: skip
    last = expanded.arms[-1]
    assert (last.setup.server.args["spec-steps"], last.setup.server.args["spec-draft-tokens"]) == (3, 3)
    assert str(last.place("server", "args", "spec-steps")).endswith("r.yaml:11:42")
    made = plan.make(expanded, FOUND)
    assert [made.arms[arm.name].expect for arm in expanded.arms] == [(), *[("speculation",)] * 3]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("server.args.spec-steps: 3,", "server.args.spec-step: 3,"),
            "`server.args.spec-step`, which is not varied",
        ),
        (("matrix: {server.args.spec-steps", "matrix: {sweep.requests"), "`matrix` cannot vary `sweep.requests`"),
        (("matrix: {", "matrx: {"), "an arm cannot set `matrx` (did you mean `matrix`?)"),
        (("[2, 3], server", '[2, "2"], server'), "two arms are called `spec,steps=2,top-k=1`"),
        (("sweep:", "matrix: {server.args.spec-steps: [9]}\nsweep:"), "`server.args.spec-steps` is varied twice"),
    ],
)
def test_a_faulty_grid_of_an_arm_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert change[0] in GRID
    assert expected in message(tmp_path, GRID.replace(*change, 1))


def test_every_value_says_which_line_of_which_file_it_is_from(tmp_path: Path) -> None:
    base = GRID.replace("  spec:\n", "  spec:\n    zip: {server.variables.A: [x, y], server.variables.B: [p, q]}\n")
    written(tmp_path, base, "base.yaml")
    child = "extends: base.yaml\nrecipe: child\nserver:\n  args: {gone: null, more: 2}\nsweep: {requests: 9}\n"
    found = where.written(loaded(tmp_path, child))
    places = {(one.arm, one.path): (one.value, one.where.replace(f"{tmp_path}/", ""), one.deleted) for one in found}
    arm = "spec,spec-steps=2,spec-top-k=4,A=y,B=q"
    assert places[arm, "server.args.step-a-ms"] == (8, "base.yaml:5:10", False)  # through `extends`
    assert places[arm, "server.args.more"] == (2, "r.yaml:4:22", False)
    assert places[arm, "server.args.gone"] == (None, "r.yaml:4:10", True)  # `null` deletes
    assert places[arm, "server.args.spec-draft-tokens"] == (3, "base.yaml:11:14", False)  # the arm's own
    assert places[arm, "server.args.spec-top-k"] == (4, "base.yaml:12:74", False)  # its matrix, the second of [1, 4]
    assert places[arm, "server.variables.B"] == ("q", "base.yaml:9:63", False)  # its zip, the second of [p, q]
    assert places[None, "sweep.concurrency"] == ([4, 1], "base.yaml:15:9", False)
    assert places[None, "sweep.requests"] == (9, "r.yaml:5:9", False)


def test_a_profiled_level_is_another_cell_and_every_other_level_the_same(tmp_path: Path) -> None:
    plain = plan.make(loaded(tmp_path), FOUND)
    traced = plan.make(loaded(tmp_path, BASE + "profile: {levels: [c4], seconds: 1}\n"), FOUND)
    cells = [[cell for _, cell in made.cells()] for made in (plain, traced)]
    for before, after in zip(*cells, strict=True):
        assert (before.cell_id == after.cell_id) == (after.level.name != "c4")
    assert cells[1][1].level.profile == {"after_s": 5.0, "seconds": 1.0}


def test_a_ramp_makes_other_cells_and_constant_arrivals_too_and_neither_moves_those_without(tmp_path: Path) -> None:
    def levels(sweep: str) -> dict[str, tuple[str, dict[str, object]]]:
        made = plan.make(loaded(tmp_path, BASE.replace("sweep: {concurrency: [4, 1]}", f"sweep: {{{sweep}}}")), FOUND)
        return {cell.level.name: (cell.cell_id, cell.level.model_dump()) for cell in made.launches[0].cells}

    plain, ramped = levels("concurrency: [4, 1]"), levels("concurrency: [4, 1], ramp_up_s: 2")
    assert [level["ramp_up_s"] for _, level in ramped.values()] == [2.0, 2.0]
    assert not any("ramp_up_s" in level for _, level in plain.values())  # or every digest of before would be another
    assert all(plain[name][0] != ramped[name][0] for name in plain)
    poisson, constant = levels("rate: [5]"), levels("rate: [5], burstiness: constant")
    assert [each["r5"][1]["burstiness"] for each in (poisson, constant)] == [1.0, "constant"]
    assert poisson["r5"][0] != constant["r5"][0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profile: {levels: [c8]}\n", "`sweep` has no level `c8`"),
        ("accept: {allreduce-fusion-silent: it is known}\n", "no rule is called `allreduce-fusion-silent`"),
    ],
)
def test_what_a_recipe_names_in_vain_is_a_fault(tmp_path: Path, text: str, expected: str) -> None:
    recipe = BASE.replace("args: {step-a-ms: 8, gone: 1}", "args: {step-ms: 8}").replace(
        "      args: {spec-draft-tokens: 3, gone: null}", "      args: {speculative-tokens: 3}"
    )
    assert findings.find(loaded(tmp_path, recipe)) == []
    with pytest.raises(InputError, match=expected):
        findings.find(loaded(tmp_path, recipe + text))


def test_an_engine_that_cannot_trace_itself_is_not_asked_to(tmp_path: Path) -> None:
    text = BASE.replace("engine: simulated\n  args: {step-a-ms: 8, gone: 1}", "engine: attach\n  url: http://h:1")
    text = text.replace("      args: {spec-draft-tokens: 3, gone: null}", "      port: 8001")
    with pytest.raises(InputError, match="engine `attach` cannot be traced"):
        findings.find(loaded(tmp_path, text + "profile: {levels: [c4]}\n"))


SHARED = BASE.replace(
    "  spec:\n",
    "  longer: {workload: {max_tokens: 32}}\n  spec-longer:\n    server: {args: {spec-draft-tokens: 3, gone: null}}\n"
    "    workload: {max_tokens: 32}\n  spec:\n",
)


def shares(made: plan.Plan) -> list[tuple[str, str | None]]:
    return [(launch.name, launch.shares) for launch in made.launches]


def test_arms_that_differ_only_in_what_they_ask_share_a_server_in_every_block(tmp_path: Path) -> None:
    made = plan.make(loaded(tmp_path, SHARED), FOUND)
    assert shares(made) == [
        ("01-baseline", None), ("02-longer", "01-baseline"), ("03-spec-longer", None), ("04-spec", "03-spec-longer"),
        # The second block turns the order around, within a server as well.
        ("05-spec", None), ("06-spec-longer", "05-spec"), ("07-longer", None), ("08-baseline", "07-longer"),
    ]  # fmt: skip
    for block in (0, 1):
        by_arm = {launch.arm: launch for launch in made.launches if launch.block == block}
        for one, other in (("baseline", "longer"), ("spec", "spec-longer")):
            used = [
                range(by_arm[name].first_prompt, max(cell.first_prompt + cell.prompts for cell in by_arm[name].cells))
                for name in (one, other)
            ]
            assert not set(used[0]) & set(used[1])  # no prompt twice on one server


def test_a_server_is_shared_neither_against_the_recipes_wish_nor_by_the_base_with_itself(tmp_path: Path) -> None:
    apart = plan.make(loaded(tmp_path, SHARED + "share_launches: false\n"), FOUND)
    assert {shared for _, shared in shares(apart)} == {None}
    itself = plan.make(loaded(tmp_path, BASE.replace("launches: 2", "launches: 1, aa: true")), FOUND)
    assert {shared for _, shared in shares(itself)} == {None}


def test_levels_share_a_launch_and_server_arguments_do_not(tmp_path: Path) -> None:
    text = BASE.replace("[4, 1]", "[1, 2, 4]").replace("launches: 2", "launches: 1")
    made = plan.make(loaded(tmp_path, text), FOUND)
    assert [len(launch.cells) for launch in made.launches] == [3, 3]
    assert {shared for _, shared in shares(made)} == {None}
