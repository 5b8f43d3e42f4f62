import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import FAKES, running, until

from harness.cli import main
from harness.run import supervise


def harness(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[int]:
    """The pid of a server's grandchild whose harness and reaper were both killed."""
    argv = [sys.executable, str(FAKES / "killed_harness.py"), str(tmp_path / "server.log"), "--setsid-child"]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guard, server, *everyone = map(int, owner.stdout.readline().split())
    owner.stdout.close()
    os.kill(owner.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    owner.kill()
    owner.wait()
    until(lambda: not running(server), "the kernel to end the server")
    yield next(pid for pid in everyone if pid != server)
    supervise.end([seen for left in supervise.leftovers() if left.launch == "killed/01-a" for seen in left.identities])


def test_a_dry_run_lists_what_is_left_and_ends_nothing(left_behind: int) -> None:
    done = harness("clean", "--dry-run")
    assert done.returncode == 0
    [row] = [line for line in done.stdout.splitlines() if line.startswith("killed/01-a")]
    assert row.split()[1] == str(left_behind)
    assert "unruly.py" in row
    assert running(left_behind)


def test_clean_ends_exactly_what_is_left(left_behind: int) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        done = harness("clean", "--json")
        assert done.returncode == 0
        [left] = [one for one in json.loads(done.stdout)["leftovers"] if one["launch"] == "killed/01-a"]
        assert [process["pid"] for process in left["processes"]] == [left_behind]
        assert left["processes"][0]["memory"] > 0
        assert not running(left_behind)
        assert bystander.poll() is None
        assert "killed/01-a" not in harness("clean", "--dry-run").stdout
    finally:
        bystander.kill()
        bystander.wait()


def test_doctor_says_what_is_wrong_and_answers_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path / "none")]) == 1
    out = capsys.readouterr().out
    assert f"refuses  model: `{tmp_path}/none` does not exist" in out
    assert out.startswith("system   ")


def test_doctor_answers_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["facts"]["format"] == "harness.facts/1"
    assert all(set(trouble) == {"subject", "message", "hint", "fatal"} for trouble in answer["troubles"])
