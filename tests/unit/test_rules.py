"""The evaluator's three answers, and strict rule files. What the project's own rules say is in test_rules_facts.py."""

from pathlib import Path

import pytest

from harness.env import rules
from harness.env.rules import Context, When
from harness.errors import InputError
from harness.strict import parse, read_text

RULE = """rules:
  {id}:
    severity: {severity}
    when: {when}
    message: what it means
    source: where it was seen
    remedy: what to do
"""


def verdict(when: str, context: Context) -> str:
    """`fires`, `silent`, or `cannot tell: FACTS` for one condition."""
    condition = parse(read_text(f"when: {when}", "rules.yaml"), When, under=("when",))
    rule = rules.Rule("one", "warning", condition, "m", "s", "r")
    fired = rules.fire([rule], context)
    if not fired:
        return "silent"
    (only,) = fired
    return only.verdict + (f": {', '.join(only.missing)}" if only.missing else "")


@pytest.mark.parametrize(
    ("when", "context", "expected"),
    [
        # versions, as PEP 440 orders them
        ('{packages: {a: ">=1.0,<2"}}', Context(packages={"A": "1.5"}), "fires"),
        ('{packages: {a: ">=1.0,<2"}}', Context(packages={"a": "2.0"}), "silent"),
        ('{packages: {a: "<0.4"}}', Context(packages={"a": "0.4+cu130"}), "silent"),
        ('{packages: {a: "==0.4"}}', Context(packages={"a": "0.4+cu130"}), "fires"),
        ('{packages: {a: ">=2.12"}}', Context(packages={"a": "2.13.0.dev20260801"}), "fires"),
        ('{packages: {a: ">=1.0"}}', Context(packages={}), "silent"),
        ('{packages: {a: ">=1.0"}}', Context(), "cannot tell: packages"),
        (
            '{packages: {a: ">=1.0"}}',
            Context(packages={"a": "main"}),
            "cannot tell: a version of a that can be read, got `main`",
        ),
        ("{packages: {a: installed}}", Context(packages={"a": "1"}), "fires"),
        ("{packages: {a: absent}}", Context(packages={"a": "1"}), "silent"),
        ("{packages: {a_b: absent}}", Context(packages={"a-b": "1"}), "silent"),
        ("{packages: {a: absent}}", Context(packages={}), "fires"),
        ('{local: {a: "cu13*"}}', Context(packages={"a": "1+cu130"}), "fires"),
        ('{local: {a: ""}}', Context(packages={"a": "1"}), "fires"),
        ('{local: {a: ""}}', Context(packages={"a": "1+cpu"}), "silent"),
        ("{differ: [a, b, c]}", Context(packages={"a": "1.0", "b": "1.0+cu130"}), "silent"),
        ("{differ: [a, b, c]}", Context(packages={"a": "1.0", "c": "1.1"}), "fires"),
        ("{differ: [a, b]}", Context(packages={"a": "1.0"}), "silent"),
        # patches, toolkit, machine
        ('{without_patches: ["fix-*"]}', Context(patches=[]), "fires"),
        ('{without_patches: ["fix-*"]}', Context(patches=["fix-1"]), "silent"),
        ('{without_patches: ["fix-*"]}', Context(), "cannot tell: patches"),
        ('{nvcc: "<12.9"}', Context(nvcc="12.8"), "fires"),
        ('{nvcc: "<12.9"}', Context(nvcc="absent"), "silent"),
        ("{nvcc: absent}", Context(nvcc="absent"), "fires"),
        ("{nvcc: absent}", Context(), "cannot tell: nvcc"),
        ('{driver: "<580"}', Context(driver="575.57.08"), "fires"),
        ('{architectures: ["sm_12*"]}', Context(architectures=["sm_90a", "sm_120a"]), "fires"),
        ('{architectures: ["sm_12*"]}', Context(architectures=[]), "silent"),
        ("{topology: pcie}", Context(topology="nvlink"), "silent"),
        ("{topology: pcie}", Context(), "cannot tell: topology"),
        ("{engine: sglang}", Context(engine="sglang"), "fires"),
        ('{model: ["*kimi*"]}', Context(model="Kimi-K2.5-INT4"), "fires"),
        # flags and variables
        ("{args: {flag: true}}", Context(args={"flag": True}), "fires"),
        ("{args: {flag: true}}", Context(args={"flag": "true"}), "fires"),
        ("{args: {flag: true}}", Context(args={"flag": False}), "silent"),
        ("{args: {flag: true}}", Context(), "cannot tell: args"),
        ("{args: {flag: 4}}", Context(args={"flag": "4"}), "fires"),
        ("{args: {name: EAGLE3}}", Context(args={"name": "eagle3"}), "fires"),
        ("{args: {flag: {given: false}}}", Context(args={"flag": None}), "fires"),
        ("{args: {flag: {given: true}}}", Context(args={"flag": 0}), "fires"),
        ("{args: {flag: {above: 1}}}", Context(args={"flag": 1}), "silent"),
        ("{args: {flag: {above: 1}}}", Context(args={"flag": "2"}), "fires"),
        ("{args: {flag: {above: 1}}}", Context(args={"flag": "many"}), "silent"),
        ("{args: {flag: {above: 1}}}", Context(args={}), "silent"),
        ("{args: {flag: {at_least: 2, at_most: 3}}}", Context(args={"flag": 3}), "fires"),
        ("{args: {flag: {at_least: 2, below: 3}}}", Context(args={"flag": 3}), "silent"),
        ("{args: {flag: {one_of: [a, b]}}}", Context(args={"flag": "b"}), "fires"),
        ("{args: {flag: {not_one_of: [a, b]}}}", Context(args={"flag": "c"}), "fires"),
        ("{args: {flag: {not_one_of: [a, b]}}}", Context(args={}), "silent"),
        ('{args: {flag: {like: "fp8*"}}}', Context(args={"flag": "FP8_e4m3"}), "fires"),
        ("{args: {flag: x}}", Context(args={"flag": ["y", "x"]}), "fires"),
        ('{args: {"tp|tp-size": {above: 2}}}', Context(args={"tp-size": 8}), "fires"),
        ("{args: {a: true, b: true}}", Context(args={"a": True}), "silent"),
        ('{variables: {V: {one_of: ["1"]}}}', Context(variables={"V": "1"}), "fires"),
        ("{variables: {V: {given: false}}}", Context(variables={}), "fires"),
        ("{variables: {V: {given: false}}}", Context(), "cannot tell: variables"),
        ("{formula: a_b > 2 * (c + 1)}", Context(args={"a-b": 7, "c": 2}), "fires"),
        ("{formula: a_b > 2 * (c + 1)}", Context(args={"a-b": 6, "c": 2}), "silent"),
        ("{formula: a > c ** 2 - 1}", Context(args={"a": 4, "c": 2}), "fires"),
        ("{formula: a > c}", Context(args={"a": 4}), "silent"),
        ("{formula: a > c}", Context(), "cannot tell: args"),
        # together: a false part settles it, whatever else is unknown
        ("{topology: pcie, engine: sglang}", Context(topology="nvlink"), "silent"),
        ("{topology: pcie, engine: sglang}", Context(topology="pcie"), "cannot tell: engine"),
        ("{any: [{topology: pcie}, {engine: vllm}]}", Context(topology="pcie"), "fires"),
        ("{any: [{topology: pcie}, {engine: vllm}]}", Context(topology="nvlink"), "cannot tell: engine"),
        ("{any: [{topology: pcie}, {engine: vllm}]}", Context(topology="nvlink", engine="sglang"), "silent"),
        ("{none: [{topology: pcie}]}", Context(topology="pcie"), "silent"),
        ("{none: [{topology: pcie}]}", Context(topology="nvlink"), "fires"),
        ("{none: [{topology: pcie}]}", Context(), "cannot tell: topology"),
    ],
)
def test_a_condition_has_three_answers(when: str, context: Context, expected: str) -> None:
    assert verdict(when, context) == expected


def test_what_fired_comes_worst_first_and_what_cannot_be_told_last() -> None:
    def rule(name: str, severity: rules.Severity, when: When) -> rules.Rule:
        return rules.Rule(name, severity, when, "m", "s", "r")

    holds = When(engine="sglang")
    found = rules.fire(
        [
            rule("a", "warning", holds),
            rule("b", "error", When(topology="pcie")),
            rule("c", "no-op", holds),
            rule("d", "error", holds),
            rule("e", "wrong answers", holds),
            rule("f", "slow", holds),
        ],
        Context(engine="sglang"),
    )

    assert [item.rule.id for item in found] == ["d", "e", "c", "f", "a", "b"]


def test_what_was_seen_is_said_once_and_in_the_words_of_a_recipe() -> None:
    when = When.model_validate_json(
        '{"packages": {"sglang": ">=0.5"}, "architectures": ["sm_12*"], "args": {"topk": {"above": 1}, "quiet": true},'
        ' "variables": {"V": {"given": false}}, "any": [{"args": {"topk": 4}}]}'
    )
    context = Context(
        packages={"sglang": "0.5.9"}, architectures=["sm_120a"], args={"topk": 4, "quiet": True}, variables={}
    )
    (fired,) = rules.fire([rules.Rule("x", "warning", when, "m", "s", "r")], context)

    assert fired.seen == ("sglang 0.5.9", "sm_120a", "--topk 4", "--quiet", "no V")


def test_an_environment_alone_is_asked_about_its_own_facts_only() -> None:
    whole = rules.Rule(
        "x", "warning", When.model_validate({"nvcc": "<13", "any": ({"args": {"a": 1}},)}), "m", "s", "r"
    )
    part = rules.Rule("y", "warning", When(nvcc="<13", differ=("a", "b")), "m", "s", "r")

    assert whole.needs == {"nvcc", "args"}
    assert rules.about([whole, part], frozenset({"packages", "nvcc", "cuda"})) == (part,)


def write(folder: Path, name: str, **given: str) -> None:
    fields = {"id": "one", "severity": "warning", "when": "{topology: pcie}", **given}
    (folder / name).write_text(RULE.format(**fields))


def test_a_rule_file_gives_rules_with_their_places(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, "b.yaml", id="two", severity="wrong answers")
    found = rules.load_all(tmp_path)

    assert [(rule.id, rule.severity, str(rule.where)) for rule in found] == [
        ("one", "warning", f"{tmp_path}/a.yaml:2:3"),
        ("two", "wrong answers", f"{tmp_path}/b.yaml:2:3"),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"severity": "eror"}, "a.yaml:3:5: `rules.one.severity`"),
        ({"when": "{topologie: pcie}"}, "unknown key `rules.one.when.topologie`"),
        ({"when": "{packages: {sglang: 0.5}}"}, "`rules.one.when.packages.sglang`"),
        ({"when": '{packages: {sglang: "newest"}}'}, "`newest` is no version specifier, such as `>=0.5.8,<0.5.13`"),
        ({"when": '{nvcc: "twelve"}'}, "`twelve` is no version specifier"),
        ({"when": "{}"}, "a condition without conditions would always hold"),
        ({"when": "{formula: a > }"}, "not a formula"),
        ({"when": "{formula: a + b}"}, "a formula is one comparison"),
        ({"when": "{formula: 1 < a < 3}"}, "a formula is one comparison"),
        ({"when": '{formula: "open(a) > 1"}'}, "a formula holds flags, numbers, + - * ** and one comparison"),
        ({"when": '{formula: "a / b > 1"}'}, "a formula holds flags, numbers, + - * ** and one comparison"),
        ({"id": "Two_Words"}, "`Two_Words` is no rule id"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_place(tmp_path: Path, given: dict[str, str], message: str) -> None:
    write(tmp_path, "a.yaml", **given)
    with pytest.raises(InputError) as caught:
        rules.load_all(tmp_path)

    assert message in str(caught.value)
    assert f"{tmp_path}/a.yaml:" in str(caught.value)


def test_the_faults_of_all_files_come_at_once(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, "b.yaml")
    write(tmp_path, "c.yaml", id="three", severity="bad")
    with pytest.raises(InputError) as caught:
        rules.load_all(tmp_path)

    assert caught.value.message == "2 faults"
    assert f"{tmp_path}/b.yaml:2:3: rule `one` is already at {tmp_path}/a.yaml:2:3" in caught.value.details


def test_a_folder_without_rules_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rules in"):
        rules.load_all(tmp_path)
