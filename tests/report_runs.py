"""Runs for tests of the report: a real one on the simulated engine, the same grown to many, and one full of malice."""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.recipe.decide import decide
from harness.recipe.site import load as load_site
from harness.run import answer, store
from harness.run.run import execute

# Two launches an arm, so that there are intervals; an open and a serial level beside the closed loops.
RECIPE = """\
recipe: short
question: Does it help, and up to which concurrency?
server:
  engine: simulated
  args: {step-ms: 8, sequence-ms: 0.5, max-running-requests: 64, time-scale: 0.2, launch-noise: 0.01}
arms:
  baseline: {}
  speculative:
    server:
      args: {speculative-tokens: 3, speculative-acceptance: 0.7, speculative-step-ms: 3, speculative-token-ms: 0.7}
workload: {prompts: "synthetic:words=12,count=300", max_tokens: 16, temperature: 0, seed: 7}
warmup: {requests: 1}
sweep: {concurrency: [1, 2, 4, 8], requests: 12}
compare: {base: baseline, treatment: ["server.args.speculative-*"], launches: 2}
expect: {speculative: [speculation]}
timeouts: {start_s: 30, request_s: 20}
"""
LEVELS = (1, 2, 3, 4, 6, 8, 12, 16)
TAG = "<img src=x onerror=window.pwned=1>"  # has no slash and no quote: it can be a folder's name
SCRIPT = "</script><script>window.pwned=1</script>"
EVERY = f"{SCRIPT}<svg onload=window.pwned=1>\"'><a href=javascript:window.pwned=1>`x`</a>{{{{7*7}}}}\u202e"


def record(folder: Path, text: str = RECIPE) -> Path:
    """Carry a recipe out in a project of its own; returns the run folder."""
    (folder / "envspecs").mkdir(parents=True)
    recipe = folder / "short.yaml"
    recipe.write_text(text)
    with contextlib.chdir(folder), _project(folder):
        site = load_site(None)
        _, plan = decide(recipe, site)
        run = store.create(folder / "runs", plan)
        execute(run, plan, site, lambda *_, **__: None)
        if (found := answer.answer(run)) is not None:
            answer.store(run, found)
    return run.path


@contextlib.contextmanager
def _project(folder: Path) -> Iterator[None]:
    before = os.environ.get("HARNESS_PROJECT")
    os.environ["HARNESS_PROJECT"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HARNESS_PROJECT"]
        else:
            os.environ["HARNESS_PROJECT"] = before


def copied(run: Path, folder: Path, name: str | None = None) -> Path:
    """A run in another place, with files that can be changed."""
    return Path(shutil.copytree(run, folder / (name or run.name)))


def grow(run: Path, folder: Path, runs: int) -> list[Path]:
    """Many runs of two arms and eight levels made of one, with every number and every time moved a little.

    The same seed for the same place, so that the same run grows into the same runs.
    """
    return [_grown(run, folder / f"2026-01-01T{number:06d}-{run.name[18:]}", number) for number in range(runs)]


def _grown(run: Path, target: Path, number: int) -> Path:
    plan = _read(run / "plan.json")
    plan["launches"] = plan["launches"][:2]
    for launch in plan["launches"]:
        cells = {cell["level"]["concurrency"]: cell for cell in launch["cells"]}
        launch["cells"] = [_cell(cells, concurrency) for concurrency in LEVELS]
    _write(target / "plan.json", plan)
    for name in ("run.json", "facts.json", "events.jsonl", "comparison.json"):
        shutil.copy(run / name, target / name)
    for launch in plan["launches"]:
        _launch(run, target, launch, random.Random(f"{number}/{launch['name']}"))
    return target


def _nearest(concurrency: int, known: Any) -> int:
    return max((one for one in known if one <= concurrency), default=min(known))


def _cell(cells: dict[int, Any], concurrency: int) -> dict[str, Any]:
    cell = json.loads(json.dumps(cells[_nearest(concurrency, cells)]))
    cell["level"] |= {"name": f"c{concurrency}", "concurrency": concurrency}
    return dict(cell)


def _launch(run: Path, target: Path, launch: dict[str, Any], source: random.Random) -> None:
    old, new = run / "launches" / launch["name"], target / "launches" / launch["name"]
    new.mkdir(parents=True)
    for name in ("launch.json", "server.log"):
        shutil.copy(old / name, new / name)
    known = [int(path.name[1:]) for path in (old / "levels").iterdir()]
    for concurrency in LEVELS:
        from_level = old / "levels" / f"c{_nearest(concurrency, known)}"
        level = _read(from_level / "level.json")
        level["level"] |= {"name": f"c{concurrency}", "concurrency": concurrency}
        factor = source.uniform(0.97, 1.03) * concurrency / _nearest(concurrency, known)
        for name, value in level["throughput"].items():
            level["throughput"][name] = value and value * factor
        folder = new / "levels" / f"c{concurrency}"
        _write(folder / "level.json", level)
        _requests(from_level / "requests.jsonl", folder / "requests.jsonl", 1 / factor)


def _requests(source: Path, target: Path, factor: float) -> None:
    """The same requests with every time stretched."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    for line in lines:
        line |= {name: line[name] * factor for name in ("sent_s", "end_s")}
        line["chunks"] = [[at * factor, read * factor, *rest] for at, read, *rest in line["chunks"]]
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))


def poison(run: Path, folder: Path) -> Path:
    """A run whose every name and text would run script in a careless page: arms, launches, log, answers, facts."""
    target = copied(run, folder, TAG)
    for path in [*target.rglob("*.json"), *target.rglob("*.jsonl")]:
        text = path.read_text()
        path.write_text(text.replace("speculative", TAG).replace("baseline", json.dumps(TAG[:-1] + " x=1>")[1:-1]))
    for path in sorted(target.rglob("*speculative*"), reverse=True):
        path.rename(path.with_name(path.name.replace("speculative", TAG)))
    for path in sorted(target.rglob("*baseline*"), reverse=True):
        path.rename(path.with_name(path.name.replace("baseline", TAG[:-1] + " x=1>")))
    for path in target.rglob("server.log"):
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line} {EVERY}\n" for line in lines))
    for path in target.rglob("launch.json"):
        _write(path, _read(path) | {"drift": [EVERY], "argv": ["serve", EVERY], "variables": {EVERY: EVERY}})
    for path in target.rglob("level.json"):
        verdict = {"state": "suspect", "reasons": [{"code": "poison", "message": EVERY}]}
        _write(path, _read(path) | {"verdict": verdict})
    for path in target.rglob("requests.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        bad = {"ok": False, "reason": EVERY, "detail": EVERY, "text": EVERY, "prompt_id": EVERY}
        path.write_text(
            "".join(json.dumps(line | (bad if number % 3 == 1 else {})) + "\n" for number, line in enumerate(lines))
        )
    _write(target / "facts.json", {"before": {EVERY: EVERY, "gpu": EVERY, "cpu": {"model": EVERY, "usable": 1}}})
    _write(target / "run.json", _read(target / "run.json") | {"troubles": [EVERY], "error": EVERY, "state": EVERY})
    plan = _read(target / "plan.json")
    _write(target / "plan.json", plan | {"question": EVERY, "recipe_path": EVERY, "allow_drift": EVERY})
    answer = _read(target / "comparison.json")
    for comparison in answer["comparisons"]:
        comparison |= {"summary": EVERY, "notes": [EVERY]}
        comparison["policy"] = (comparison["policy"] or {}) | {"sentence": EVERY}
    _write(target / "comparison.json", answer)
    return target


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
