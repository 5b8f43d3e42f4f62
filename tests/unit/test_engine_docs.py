"""docs/engines.md names tests as proof: they exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_a_trap_names_is_there() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 15))
    for number, row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, f"trap {number} names no test"
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(), f"trap {number}: there is no {path}::{test}"
