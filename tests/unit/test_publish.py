"""Marked blocks and the logbook."""

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.publish import docs, logbook

TEXT = """\
# Title
<!-- harness:begin a -->
old
<!-- harness:end a -->
by hand
<!-- harness:begin b -->
<!-- harness:end b -->
"""


def test_only_the_block_changes() -> None:
    changed = docs.replace_block(TEXT, "a", "new\nlines\n", path="d.md")
    assert changed == TEXT.replace("old\n", "new\nlines\n")
    assert docs.replace_block(changed, "a", "new\nlines", path="d.md") == changed


def test_an_empty_block_is_filled() -> None:
    assert "begin b -->\nx\n<!-- harness:end b" in docs.replace_block(TEXT, "b", "x", path="d.md")


@pytest.mark.parametrize(
    ("text", "block", "expected"),
    [
        (TEXT, "c", "`d.md` has no block `c`"),
        (TEXT.replace("<!-- harness:end a -->\n", ""), "a", "`d.md:2`: block `a` is broken: 1 begin and 0 end markers"),
        (TEXT + TEXT, "a", "`d.md:2`: block `a` is broken: 2 begin and 2 end markers"),
        ("<!-- harness:end a -->\n<!-- harness:begin a -->\n", "a", "`d.md:2`: block `a` is broken"),
    ],
)
def test_a_broken_or_missing_marker_is_an_error_with_its_line(text: str, block: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        docs.replace_block(text, block, "x", path="d.md")
    assert expected in str(caught.value)


def test_a_stale_block_shows_its_difference_and_a_fresh_one_none(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    path.write_text(TEXT)
    assert "-old" in docs.stale(path, "a", "new")
    assert docs.publish(path, "a", "new") is True
    assert docs.stale(path, "a", "new") == ""
    assert docs.publish(path, "a", "new") is False


def test_the_logbook_is_only_appended_to_and_a_run_stands_in_it_once(tmp_path: Path) -> None:
    path = tmp_path / "LOGBOOK.md"
    path.write_text("# Logbook\n\nby hand\n")
    entry = logbook.Entry("2026-11-29", "run-1", "demo", "why?", "because", ["x 1234"], ["c8: suspect: slow"])
    assert logbook.append(path, entry) is True
    assert logbook.append(path, entry) is False
    assert path.read_text() == (
        "# Logbook\n\nby hand\n\n## 2026-11-29 run: demo\n\n- question: why?\n- answer: because\n"
        "- run: `run-1`; environment: x 1234\n- note: c8: suspect: slow\n"
    )


def test_a_missing_logbook_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*LOGBOOK\.md"):
        logbook.append(tmp_path / "LOGBOOK.md", logbook.Entry("d", "r", "n", "q", "v", []))
