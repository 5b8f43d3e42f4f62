"""docs/simulated-engine.md has every fault and computes its examples rightly."""

from pathlib import Path

from harness.engines.simulation.faults import PROCESS, REQUEST

DOC = Path(__file__).parents[2] / "docs" / "simulated-engine.md"


def rows():
    for title, kinds in (("process", PROCESS), ("request", REQUEST)):
        for name, kind in kinds.items():
            value = f"`{kind.default}`" if kind.read else ""
            yield f"| {title} | `{name}` | {kind.does} | {value} |"


def test_the_table_of_faults_is_the_programs_own():
    block = DOC.read_text().split("<!-- faults -->\n")[1].split("<!-- /faults -->")[0]
    assert block.splitlines() == ["| of a | fault | what it does | default value |", "|---|---|---|---|", *rows()]


def test_the_worked_examples_follow_from_the_formula():
    text = DOC.read_text()
    for concurrency in (1, 2, 10, 250):
        assert f"{concurrency / (0.0095 + 0.00129 * concurrency):.1f}" in text


def test_every_flag_of_the_formulas_is_a_flag():
    from harness.engines.flags.own import table

    named = ["step-ms", "sequence-ms", "speculative-step-ms", "speculative-token-ms", "prefill-token-ms"]
    named += ["speculative-tokens", "speculative-acceptance", "max-running-requests"]
    assert all(f"`{name}`" in DOC.read_text() and table("simulated").find(name) for name in named)
