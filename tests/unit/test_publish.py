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


def filled(text: str, name: str, content: str) -> str:
    return docs.rewrite(text, lambda block: content if block.name == name else None, path="d.md")


def test_only_the_block_changes() -> None:
    changed = filled(TEXT, "a", "new\nlines\n")
    assert changed == TEXT.replace("old\n", "new\nlines\n")
    assert filled(changed, "a", "new\nlines") == changed


def test_an_empty_block_is_filled() -> None:
    assert "begin b -->\nx\n<!-- harness:end b" in filled(TEXT, "b", "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            TEXT.replace("<!-- harness:end a -->\n", ""),
            "d.md:2:1: block `a` begins here and does not end",
        ),
        (TEXT + TEXT, "d.md:9:1: block `a` stands here a second time, the first is in line 2"),
        ("x\n<!-- harness:end a -->\n", "d.md:2:1: block `a` ends here and did not begin"),
        ("<!-- harness:begin a -->\n<!-- harness:end b -->\n", "d.md:2:1: block `b` ends here and did not begin"),
        ("<!-- harness:begin a -->\n", "d.md:1:1: block `a` begins here and does not end"),
        ("<!-- harness:begn a -->\n", "d.md:1:1: `<!-- harness:begn a -->` is no marker"),
        ("<!--harness:begin a-->\n", "d.md:1:1: `<!--harness:begin a-->` is no marker"),
        ("<!-- harness:begin a verdct -->\n<!-- harness:end a -->\n", "d.md:1:1: block `a` has no part `verdct`"),
    ],
)
def test_a_broken_marker_is_an_error_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        docs.blocks(text, "d.md")
    assert expected in str(caught.value)


def test_every_broken_marker_of_a_document_is_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        docs.blocks("<!-- harness:end x -->\n<!-- harness:begin y odd -->\n", "d.md")
    assert [fault.where.line for fault in caught.value.faults if fault.where] == [1, 2, 2]


def test_markers_in_fenced_code_are_text() -> None:
    fenced = "~~~\n<!-- harness:begin a -->\n```\n~~~\n````\n<!-- harness:end z -->\n```\n````\n"
    assert [str(block) for block in docs.blocks(fenced + TEXT, "d.md")] == ["a", "b"]


def test_blocks_of_one_name_show_their_parts(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    path.write_text(
        "<!-- harness:begin a verdict -->\n<!-- harness:end a -->\nmine\n"
        "<!-- harness:begin a -->\n<!-- harness:end a -->\n"
    )
    assert docs.publish(path, "a", lambda part: f"({part})")
    assert path.read_text() == (
        "<!-- harness:begin a verdict -->\n(verdict)\n<!-- harness:end a -->\nmine\n"
        "<!-- harness:begin a -->\n(all)\n<!-- harness:end a -->\n"
    )


def test_a_document_without_the_block_says_which_it_has(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    path.write_text(TEXT)
    with pytest.raises(InputError) as caught:
        docs.check(path, "c")
    assert f"`{path}` has no block `c`" in str(caught.value)
    assert "blocks here: `a`, `b`" in str(caught.value)


def test_a_stale_block_shows_its_difference_and_a_fresh_one_none(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    path.write_text(TEXT)
    assert "-old" in docs.stale(path, "a", lambda _: "new")
    assert docs.publish(path, "a", lambda _: "new") is True
    assert docs.stale(path, "a", lambda _: "new") == ""
    assert docs.publish(path, "a", lambda _: "new") is False


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


def test_a_question_forges_no_entry_no_marker_and_no_colour_in_the_logbook(tmp_path: Path) -> None:
    path = tmp_path / "LOGBOOK.md"
    path.write_text("# Logbook\n")
    question = "a\n## 2020-01-01 run: fake\n<!-- harness:begin quick -->\n- run: `run-2`;\u2028\x1b[31mred\u202e"
    assert logbook.append(path, logbook.Entry("2026-11-29", "run-1", "demo", question, "x\r# y", [], ["z\n## w"]))
    assert path.read_text() == (
        "# Logbook\n\n## 2026-11-29 run: demo\n\n"
        "- question: a ## 2020-01-01 run: fake &lt;!-- harness:begin quick --> - run: `run-2`; \\x1b[31mred\\u202e\n"
        "- answer: x # y\n- run: `run-1`; environment: none\n- note: z ## w\n"
    )
    assert docs.blocks(path.read_text(), "LOGBOOK.md") == []
    assert logbook.append(path, logbook.Entry("2026-11-29", "run-2", "demo", "why?", "because", []))


def test_a_run_that_failed_and_then_went_on_has_two_entries(tmp_path: Path) -> None:
    path = tmp_path / "LOGBOOK.md"
    path.write_text("# Logbook\n")
    failed = logbook.Entry("2026-11-29", "run-1", "demo", "why?", "failed: it died", [], state="failed")
    done = logbook.Entry("2026-11-30", "run-1", "demo", "why?", "because", [])
    assert [logbook.append(path, one) for one in (failed, failed, done, done)] == [True, False, True, False]
    assert "- run: `run-1` (failed); environment: none\n" in path.read_text()
    assert "- run: `run-1`; environment: none\n" in path.read_text()


def test_a_missing_logbook_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*LOGBOOK\.md"):
        logbook.append(tmp_path / "LOGBOOK.md", logbook.Entry("d", "r", "n", "q", "v", []))
