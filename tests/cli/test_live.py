"""What a run shows on a real terminal, and what stays off stdout."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli.conftest import QUICK, Workplace
from servers import serving

from harness.engines import simulated

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The speculative arm is slow enough for its server's counters to be read several times while a level goes on.
SLOW = (
    QUICK.replace("step-ms: 2,", "step-ms: 15,")
    .replace("{speculative-tokens: 3,", "{step-ms: 100, speculative-tokens: 3,")
    .replace('treatment: ["server.args.speculative-*"]', 'treatment: ["server.args.*"]')
    .replace("requests: 4}", "requests: 10}")
    .replace("publish: [{doc: docs/quick.md, block: quick}, logbook]\n", "")
)
ROW = re.compile(r"^(?P<level>c\d) +(?P<done>\d+)/10 +(?P<active>\d+|-) +(?P<rest>.*)$")


@dataclass
class Shown:
    """What came to a terminal, and to stdout where that was a pipe."""

    code: int
    terminal: str
    out: str

    @property
    def lines(self) -> list[str]:
        """Every line that was ever drawn, without its colours."""
        return [CONTROL.sub("", line) for line in re.split(r"\r?\n|\r", self.terminal)]


def on_terminal(folder: Path, *words: str, piped: bool = True, columns: int = 80, **variables: str) -> Shown:
    """One command whose stderr (and stdout, unless piped) is a terminal of 24 lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *words],
        cwd=folder,
        stdin=follower,
        stdout=subprocess.PIPE if piped else follower,
        stderr=follower,
        env={**known, "TERM": "xterm-256color", **variables},
        start_new_session=True,
    )
    os.close(follower)
    terminal, out = _drained(leader, process)
    os.close(leader)
    return Shown(process.wait(60), terminal, out)


def _drained(leader: int, process: "subprocess.Popen[bytes]") -> tuple[str, str]:
    """Everything from the terminal and from the pipe, until both are closed."""
    open_ends = {leader: b"", **({process.stdout.fileno(): b""} if process.stdout else {})}
    going = set(open_ends)
    while going:
        for end in select.select(list(going), [], [], 120)[0]:
            try:
                data = os.read(end, 1 << 16)
            except OSError:  # how Linux says that nobody holds a terminal any more
                data = b""
            open_ends[end] += data
            if not data:
                going.discard(end)
    if process.stdout:
        out = open_ends[process.stdout.fileno()]
        process.stdout.close()
        return open_ends[leader].decode(), out.decode()
    return open_ends[leader].decode(), ""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A run whose talk goes to a terminal of 80 columns, and its answer into a pipe."""
    root = tmp_path_factory.mktemp("terminal")
    (root / "envspecs").mkdir()
    (root / "slow.yaml").write_text(SLOW)
    return on_terminal(root, "run", "slow.yaml", "--json")


def test_the_plan_is_a_tree_that_fills_in_level_by_level(shown: Shown) -> None:
    assert shown.code in {0, 1}, shown.terminal
    trees = [line for line in shown.lines if "of 4 levels" in line]
    assert trees[0].startswith("quick  0 of 4 levels")
    assert trees[-1].startswith("quick  4 of 4 levels")
    text = "\n".join(shown.lines)
    assert "├── 01-baseline  waiting" in text
    assert "└── 02-speculative  waiting" in text
    # Either may pass between two frames of a busy machine: the start, or a milestone of the server's log.
    assert re.search(r"0[12]-\w+  (starting simulated|[\d.]+ s: \w+)", text)
    assert "01-baseline  measuring c2" in text
    assert re.search(r"about \d+ s left", text)


def test_a_level_that_goes_on_shows_its_figures(shown: Shown) -> None:
    rows = [ROW.match(line.strip("│├└─ ")) for line in shown.lines]
    going = [row for row in rows if row and row["rest"].endswith("measuring")]
    assert {row["level"] for row in going} == {"c1", "c2"}
    assert "2" in {row["active"] for row in going if row["level"] == "c2"}
    rate, ttft, errors, accept, lag = zip(*(row["rest"].split()[:5] for row in going), strict=True)
    assert any(float(value) > 0 for value in rate if value != "-")
    assert any(float(value) > 0 for value in ttft if value != "-")
    assert set(errors) == {"0"}
    assert any(1 <= float(value) <= 4 for value in accept if value != "-")  # 3 tokens are drafted a step
    assert any(float(value) >= 0 for value in lag if value != "-")


def test_no_line_of_the_tree_is_wider_than_the_terminal(shown: Shown) -> None:
    tree = [line.rstrip() for line in shown.lines if line.startswith(("quick  ", "├", "└", "│", "    "))]
    assert len(tree) > 20
    assert max(len(line) for line in tree) <= 80


def test_stdout_holds_the_answer_and_nothing_of_the_tree(shown: Shown) -> None:
    assert json.loads(shown.out)["state"] == "done"


def test_rows_on_the_same_terminal_are_never_torn(tmp_path: Path) -> None:
    """`bench` prints rows on stdout while its tree is drawn on stderr."""
    with serving(simulated.ENGINE, tmp_path, args={"step-ms": 20}) as server:
        done = on_terminal(
            tmp_path,
            "bench",
            f"http://127.0.0.1:{server.port}",
            "-c",
            "1,2",
            "-n",
            "4",
            "--max-tokens",
            "8",
            piped=False,
            columns=160,
        )
    assert done.code == 0, done.terminal
    rows = [line for line in done.lines if line.startswith("C=")]
    assert [row[:18] for row in rows] == ["C=  1 | 4 requests", "C=  2 | 4 requests"]
    assert all(re.search(r"\| ok: 4/4( \| simulated)?$", row) for row in rows)


def test_a_quiet_run_leaves_the_terminal_alone(workplace: Workplace) -> None:
    workplace.recipe(SLOW.replace("requests: 10}", "requests: 2}").replace("step-ms: 100", "step-ms: 10"), "slow.yaml")
    done = on_terminal(workplace.root, "run", "slow.yaml", "-q")
    assert done.code in {0, 1}
    assert all("warning: " in line for line in done.lines if line.strip())


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(workplace: Workplace, variables: dict[str, str]) -> None:
    workplace.recipe(SLOW.replace("requests: 10}", "requests: 2}").replace("step-ms: 100", "step-ms: 10"), "slow.yaml")
    done = on_terminal(workplace.root, "run", "slow.yaml", **variables)
    assert done.code in {0, 1}
    assert "\x1b[1A" not in done.terminal
    assert any(line.startswith("[01-baseline] C=  1 | 2 requests") for line in done.lines)
