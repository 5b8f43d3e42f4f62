"""`scripts/gpu_check.sh` on a machine without a GPU, and with stand-ins for the GPU, torch and the engine.

The stand-in interpreter answers what the script asks of Python, and starts the simulated server where SGLang would
start; the rest is the script's own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"""\
#!/bin/bash
# find_spec questions: everything named in HAS is there
case "$*" in
*find_spec*) for name in $HAS; do case "$2" in *"'$name'"*) exit 0 ;; esac; done; exit 1 ;;
*tiny_llama.py*) mkdir -p "${{@: -1}}"; echo made ;;
*sglang.launch_server*)
    while [ $# -gt 0 ]; do [ "$1" = --port ] && port=$2; shift; done
    [ "$SERVER" = hangs ] && exec sleep 600
    exec {sys.executable} -m harness.engines.simulated_server --port "$port" --served-model-name tiny --step-ms 1 ;;
*) cat >/dev/null; [ "$TORCH" = broken ] && echo "AssertionError: sm_90" && exit 1; echo fine ;;
esac
"""
GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA Imaginary (UUID: GPU-0)'\n"


def tool(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with what the script needs of a system, and no `nvidia-smi`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    needed = (
        "bash", "cat", "curl", "cut", "date", "dirname", "env", "grep", "mkdir", "mktemp", "seq", "setsid",
        "sh", "sleep", "tail", "tee", "timeout", "tr",
    )  # fmt: skip
    for name in needed:
        where = shutil.which(name)
        if where is None:
            pytest.skip(f"no `{name}` here")
        (folder / name).symlink_to(where)
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    return folder


def checked(tools: Path, out: Path, **variables: str) -> tuple[int, dict[str, tuple[str, str]], dict[str, Any]]:
    """Exit code, verdict and reason of each check, and the whole summary."""
    environment = {"PATH": str(tools), "PYTHONPATH": str(ROOT), "PYTHON": str(tools / "python"), **variables}
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "gpu_check.sh", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    summary = json.loads((out / "summary.json").read_text())
    return done.returncode, {one["check"]: (one["verdict"], one["reason"]) for one in summary["checks"]}, summary


def test_without_a_gpu_nothing_is_run_and_everything_says_why(tools: Path, tmp_path: Path) -> None:
    logbook = tmp_path / "LOGBOOK.md"
    code, checks, summary = checked(tools, tmp_path / "out", LOGBOOK=str(logbook))
    assert code == 0
    assert summary["format"] == "harness.gpu-check/1"
    assert set(checks) == {"driver", "torch", "events", "server", "load"}
    assert set(checks.values()) == {("not run", "no NVIDIA GPU on this machine")}
    entry = logbook.read_text()
    assert entry.startswith("\n## 2")
    assert "- not run: driver, torch, events, server, load (no NVIDIA GPU on this machine)" in entry


def test_with_torch_alone_the_server_is_left_out(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvidia-smi", GPU)
    tool(tools, "python", PYTHON)
    code, checks, _ = checked(tools, tmp_path / "out", HAS="torch")
    assert code == 0
    assert [checks[name][0] for name in ("driver", "torch", "events")] == ["ok"] * 3
    assert checks["server"][0] == checks["load"][0] == "not run"
    assert "neither sglang nor vllm" in checks["server"][1]


def test_a_torch_that_cannot_use_the_gpu_ends_the_check_as_failed(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvidia-smi", GPU)
    tool(tools, "python", PYTHON)
    code, checks, _ = checked(tools, tmp_path / "out", HAS="torch sglang transformers", TORCH="broken")
    assert code == 1
    assert checks["torch"] == ("failed", "exit 1: AssertionError: sm_90")
    assert checks["server"] == checks["load"] == ("not run", "torch did not pass")


def test_with_an_engine_a_server_is_started_asked_put_under_load_and_stopped(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvidia-smi", GPU)
    tool(tools, "python", PYTHON)
    tool(tools, "harness", f'#!/bin/sh\nexec {sys.executable} -m harness "$@"\n')
    more = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    code, checks, _ = checked(tools, tmp_path / "out", HAS="torch sglang transformers", **more)
    assert (code, checks["model"][0], checks["server"]) == (0, "ok", ("ok", "sglang answered with 64 tokens"))
    assert checks["load"][0] == "ok"
    answer = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert answer["usage"]["completion_tokens"] == 64
    levels = json.loads((tmp_path / "out" / "load.json").read_text())["levels"]
    assert [(level["level"]["concurrency"], level["ok"]) for level in levels] == [(1, 32), (8, 32)]
    assert "harness.engines.simulated_server" not in running(tmp_path)


def test_a_server_that_never_answers_is_a_result_within_the_budget(tools: Path, tmp_path: Path) -> None:
    tool(tools, "nvidia-smi", GPU)
    tool(tools, "python", PYTHON)
    code, checks, _ = checked(tools, tmp_path / "out", HAS="torch sglang transformers", SERVER="hangs", BUDGET_S="6")
    assert code == 1
    assert checks["server"][0] == "timeout"
    assert checks["load"][0] == "not run"
    assert "sleep 600" not in running(tmp_path)


def running(folder: Path) -> str:
    """Command lines of processes whose environment names this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(found)
