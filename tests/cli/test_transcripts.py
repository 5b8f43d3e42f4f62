"""Commands in the documents do what the documents say."""

import argparse
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli import transcripts
from cli.transcripts import PAGES, Page, Session, alike, matches

from harness.cli import parser as command_line

ALL = [transcripts.read(path) for path in PAGES]
PLAYED = [page for page in ALL if page.played]
NOT_RUN = [
    (page, block, command)
    for page in ALL
    for block in page.blocks
    if block.not_run is not None
    for command in block.commands
    if command.text.startswith("harness ")
]
# What needs a cluster, or a second run of minutes, is shown in documents and played by tests of its own.
PLAYED_ELSEWHERE = {"follow": "tests/slurm", "reproduce": "tests/cli/test_reproduce.py"}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    root = tmp_path / "project"
    root.mkdir()
    for name in ("HARNESS_HOME", "HARNESS_PROJECT", "HARNESS_SITE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(root)
    session = Session(root)
    yield session
    session.end()


@pytest.mark.parametrize("page", PLAYED, ids=lambda page: page.name)
def test_a_page_prints_what_it_says(page: Page, session: Session) -> None:
    session.prepare(page)
    wrong, printed_at = [], {}
    for block in page.blocks:
        if block.not_run is not None:
            continue
        for command, printed in session.play(block):
            printed_at[command.line] = printed
            if not matches(command.expected, printed, session.root):
                sides = (alike(text, session.root).splitlines() for text in (command.expected, printed))
                shown = "\n".join(difflib.unified_diff(*sides, "the page", "the command", lineterm=""))
                wrong.append(f"{page.name}:{command.line}: $ {command.text}\n{shown}\n\nprinted:\n{printed}")
    if wrong and os.environ.get("UPDATE_TRANSCRIPTS"):
        transcripts.rewrite(page, printed_at, session)
    assert not wrong, "\n\n".join([*wrong, "UPDATE_TRANSCRIPTS=1 writes what was printed, when that is meant"])
    assert session.code == 0, f"the last command of {page.name} ended with {session.code}, which no `echo $?` shows"


@pytest.mark.parametrize(
    ("page", "block", "command"), NOT_RUN, ids=[f"{page.name}:{command.line}" for page, _, command in NOT_RUN]
)
def test_a_command_that_is_not_run_is_a_command_that_there_is(page, block, command, monkeypatch) -> None:
    del page, block
    arguments = command_line().parse_args(command.words[1:])
    monkeypatch.chdir(transcripts.ROOT)
    recipe = getattr(arguments, "recipe", None)
    if command.words[1] == "run" and isinstance(recipe, Path) and recipe.is_file():
        code, said = transcripts.in_process(["plan", str(recipe), "--out", "no-runs-here"])
        assert code == 0, said


def test_a_block_that_is_not_run_says_why() -> None:
    reasons = [block.not_run for page in ALL for block in page.blocks if block.not_run is not None]
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


def test_every_verb_is_shown_working() -> None:
    [verbs] = [action.choices for action in command_line()._actions if isinstance(action, argparse._SubParsersAction)]
    shown = {command.words[1] for page in ALL for command in page.played if command.words[0] == "harness"}
    assert sorted(set(verbs) - shown - set(PLAYED_ELSEWHERE)) == []
    assert [path for path in PLAYED_ELSEWHERE.values() if not (transcripts.ROOT / path).exists()] == []


def test_no_transcript_escapes_by_its_form() -> None:
    """Commands stand in ```console blocks, where they are played or say why not."""
    prose = [(page.name, re.sub(r"```.*?```", "", page.path.read_text(), flags=re.DOTALL)) for page in ALL]
    assert [(name, line) for name, text in prose for line in text.splitlines() if re.match(r" {4,}\$ ", line)] == []


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("C=1 | 22.7 tok/s", "C=1 |  9.1 tok/s", True),
        ("C=1 valid", "C=1 invalid", False),
        ("C=1 valid", "C=1 suspect", True),
        ("a\nb", "a\nc1: suspect: reads were late\nb", True),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nb\nc", False),
        ("2 launches", "3 launches", False),
        ("run 2026-11-29T203121-demo-d47faaba: 2 cells", "run 2031-01-02T030405-demo-00000000: 2 cells", True),
        ("run 2026-11-29T203121-demo-d47faaba: 2 cells", "run 2031-01-02T030405-other-00000000: 2 cells", False),
        ("deadline ... at c1", "deadline 644 s at c1", True),
        ("", "something", False),
    ],
)
def test_only_what_differs_from_run_to_run_is_overlooked(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed, Path("/nowhere")) is same
