"""Every fault of the matrix, injected into a whole run from outside: right exit code and class, nothing left running,
nothing lost, and a resumed run that equals an undisturbed one in everything but times."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faults.matrix import CASES, SAMPLE, Case, Outcome, markdown
from processes import carriers, until
from ruamel.yaml import YAML

from harness.cli import main
from harness.files import read_json, write_json
from harness.load import spool
from harness.load.records import RequestRecord
from harness.publish import docs
from harness.run import reaper, store

HERE = Path(__file__).parent
LIMIT_S = 150.0
LLAMACPP = {
    "server": {"engine": "llamacpp", "args": {"threads": 1, "parallel": 2, "ctx-size": 4096}},
    "arms": {"plain": {}},
    "workload": {
        "prompts": "synthetic:words=30,count=1200,seed=0",
        "max_tokens": 150,
        "ignore_eos": True,
        "temperature": 0,
        "seed": 7,
    },
    "sweep": {"concurrency": [1, 2], "requests": 8},
    "timeouts": {"request_s": 60, "start_s": 61},
}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def note(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case, Outcome], None]]:
    """Takes what came out of each case. When every case did, the table goes into the document HARNESS_RELIABILITY.

    HARNESS_OUTCOMES names a folder that several calls of pytest share, each with some of the cases.
    """
    folder = Path(os.environ.get("HARNESS_OUTCOMES") or tmp_path_factory.mktemp("outcomes"))

    def take(case: Case, outcome: Outcome) -> None:
        write_json(folder / f"{case.name}.json", asdict(outcome))

    yield take
    target = os.environ.get("HARNESS_RELIABILITY")
    if target and all((folder / f"{case.name}.json").is_file() for case in CASES):
        found = [(case, Outcome(**read_json(folder / f"{case.name}.json"))) for case in CASES]
        docs.publish(Path(target), "faults", lambda _: markdown(found))


@pytest.fixture(scope="session")
def changes(request: pytest.FixtureRequest) -> Callable[[Case], dict[str, Any]]:
    """What a case's recipe has in place of the common one's."""

    def of(case: Case) -> dict[str, Any]:
        if not case.real:
            return case.changes
        request.getfixturevalue("llamacpp_python")  # built, if it was not before
        model = {"path": str(request.getfixturevalue("tiny_model")), "name": "tiny"}
        return {"env": "llamacpp-cpu", "model": model, **LLAMACPP, **case.changes}

    return of


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, changes: Callable[[Case], dict[str, Any]]
) -> Callable[[Case], Path]:
    """Runs without a fault, one for each recipe."""
    folder = tmp_path_factory.mktemp("undisturbed")
    known: dict[str, Path] = {}

    def run(case: Case) -> Path:
        # Deadlines that are short on purpose are part of the fault; a larger sweep needs longer ones.
        without = {"on_failure"} if "sweep" in case.changes else {"on_failure", "timeouts"}
        mine = {name: value for name, value in changes(case).items() if name not in without or case.real}
        key = str(mine)
        if key not in known:
            name = f"undisturbed-{len(known)}"
            done = harness(folder, name, recipe_of(mine, folder))
            assert done.returncode == 0, done.stderr
            known[key] = folder / "runs" / name
        return known[key]

    return run


def harness(
    folder: Path, name: str, recipe: Path, *more: str, breaks: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    start = [str(HERE / "driver.py"), *breaks, "--"] if breaks else ["-m", "harness"]
    words = ["run", str(recipe), "--out", "runs", "--no-publish", *more]
    with (folder / f"{name}.err").open("w+") as errors:  # a file: what outlives the harness holds no pipe of ours
        done = subprocess.run(
            [sys.executable, *start, *words, *(() if more else ("--name", name))],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "HARNESS_FAULT": name, "HARNESS_PROJECT": str(HERE.parent.parent)},
        )
        errors.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, "", errors.read())


def anybody(name: str) -> list[int]:
    """Who is left of a run: servers by their mark, helpers of the harness by the variable we gave it."""
    return [*carriers(f"{name}/"), *(pid for pid, seen in reaper.scan().items() if seen.alive and _ours(pid, name))]


def _ours(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"HARNESS_FAULT={name}".encode() in words and b"unruly.py" not in argv  # the stranger is not ours


def recipe_of(changes: Mapping[str, Any], folder: Path) -> Path:
    yaml = YAML()
    data = yaml.load(HERE / "recipe.yaml")
    target = folder / "recipe.yaml"
    with target.open("w") as stream:
        data.update(changes)
        yaml.dump(data, stream)
    return target


def kept(run: Path) -> Counter[str]:
    """Every request that is on disk, as the line it is stored in: of finished levels, of attempts that were set aside,
    and of levels whose client had only noted it."""
    found: Counter[str] = Counter()
    for folder in run.glob("launches/*/levels/*"):
        lines: Counter[str] = Counter()
        for path in folder.glob("requests*.jsonl"):
            if path.is_file():
                lines.update(line.strip() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
        found += lines | Counter(record.to_line() for record in spool.recover(folder / "client"))
    return found


def substance(run: Path, *, texts: bool) -> Mapping[str, Any]:
    """A run without its times. Texts of a real server depend on what it batched together, which is a matter of time."""
    opened = store.open_run(run)
    found: dict[str, Any] = {"state": opened.state()["state"]}
    for launch, result in opened.levels():
        level = str(result.level["name"])
        records = [_essence(record, texts) for record in opened.requests(launch, level) if record.phase == "measure"]
        found[f"{launch} {level}"] = {
            "cell_id": result.cell_id,
            "ok": f"{result.ok} of {result.requests}",
            "output_tokens": result.output_tokens,
            "prompt_tokens": result.prompt_tokens,
            "requests": sorted(records),
        }
    return found


def _essence(record: RequestRecord, texts: bool) -> tuple[Any, ...]:
    text = record.text_sha256 if texts else None
    return (record.prompt_id, record.ok, record.output_tokens, record.finish_reason, text)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in SAMPLE else pytest.mark.faults) for case in CASES],
)
def test_a_fault_ends_well(
    case: Case,
    tmp_path: Path,
    changes: Callable[[Case], dict[str, Any]],
    undisturbed: Callable[[Case], Path],
    note: Callable[[Case, Outcome], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, run = recipe_of(changes(case), tmp_path), tmp_path / "runs" / case.name
    done = harness(tmp_path, case.name, recipe, breaks=case.breaks)
    code = 128 - done.returncode if done.returncode < 0 else done.returncode
    said = re.search(case.says, done.stderr)
    assert code == case.exit, done.stderr
    assert said, done.stderr
    assert code == 137 or "Traceback" not in done.stderr, done.stderr
    until(lambda: not anybody(case.name), f"everything of {case.name} to be gone")

    assert main(["show", str(run), "--json"]) == 0
    verdicts = [level["verdict"]["state"] for level in json.loads(capsys.readouterr().out)["levels"]]
    before = kept(run)
    after = "whole" if case.whole else "numbers stand, marked suspect"
    if not (case.whole or case.marked):
        again = harness(tmp_path, case.name, recipe, "--resume")
        assert again.returncode == 0, again.stderr
        assert not anybody(case.name)
        after = "resumed, whole"
    lost = before - kept(run)
    assert not lost
    assert [path.name for path in run.parent.iterdir()] == [case.name]
    if case.marked:
        assert "suspect" in verdicts
    else:
        assert substance(run, texts=not case.real) == substance(undisturbed(case), texts=not case.real)
    note(case, Outcome(code, said.group(0), after))
