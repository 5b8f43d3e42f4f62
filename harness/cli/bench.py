"""Verbs: bench. A sweep over a server that already runs, without a recipe; the recipe it stood for is left behind."""

import argparse
import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from harness.cli.talk import Verbs, common
from harness.errors import Fault, InputError, Interrupted, MeasurementError

if TYPE_CHECKING:
    from harness.cli.live import LiveView
    from harness.recipe.plan import Plan
    from harness.recipe.site import Site
    from harness.run.store import Run
    from harness.run.sweep import Tell

_DIALECTS = ("chat", "completions", "generate")


def register(verbs: Verbs) -> None:
    """Add this room's verbs."""
    bench = common(verbs.add_parser("bench", help="sweep over a server that already runs, without a recipe"))
    bench.add_argument("url", help="where it listens: http://127.0.0.1:8000")
    bench.add_argument("-c", "--concurrency", metavar="N,N,...", help="levels of a closed loop (default: 1,2,5,10)")
    bench.add_argument("--rate", metavar="R,R,...", help="levels of an open loop instead: requests a second")
    bench.add_argument(
        "--burstiness",
        type=_burstiness,
        default=1.0,
        metavar="B",
        help="open loop: 1 is Poisson, less burstier, `constant` not at all",
    )
    bench.add_argument("--ramp-up", type=float, metavar="S", help="closed loop: its slots begin over S seconds")
    bench.add_argument("-n", "--requests", type=int, metavar="N", help="requests a level (default: max(30, 4*C))")
    bench.add_argument("--duration", type=float, metavar="S", help="seconds a level; with -n, whichever comes first")
    bench.add_argument("--prompts", default="coding", metavar="SET", help="prompt set or JSONL file (default: coding)")
    bench.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens a request (default: 512)")
    bench.add_argument("--temperature", type=float, default=0.0, metavar="T")
    bench.add_argument("--seed", type=int, default=0, metavar="N")
    bench.add_argument("--dialect", choices=_DIALECTS, default="chat", help="how to ask (default: chat)")
    bench.add_argument("--stop-early", action="store_true", help="let answers end by themselves (no ignore_eos)")
    bench.add_argument("--warmup", type=int, default=0, metavar="N", help="unmeasured requests first (default: 0)")
    bench.add_argument(
        "--goodput", action="append", metavar="NAME:MS,...", help="count requests that keep these: ttft:500,tpot:50"
    )
    bench.add_argument("--ca-file", type=Path, metavar="FILE", help="https: certificate of the server's authority")
    bench.add_argument("--insecure", action="store_true", help="https: believe any certificate")
    bench.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)")
    bench.add_argument("--name", help="name of the run folder (default: time, recipe and plan)")
    bench.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """`harness bench`."""
    recipe = recipe_of(arguments)
    from harness.cli.live import LiveView
    from harness.recipe.site import load as load_site
    from harness.run import preflight, store
    from harness.run.run import execute

    site = load_site()
    plan = _planned(arguments.out / "recipes", recipe, site)
    for trouble in preflight.cpu():
        arguments.talk.line(f"warning: {trouble}")
    for finding in plan.findings:
        arguments.talk.line(str(finding))
    run = store.create(arguments.out, plan, name=arguments.name)
    with LiveView(arguments.talk, cells=sum(1 for _ in plan.cells()), run=run) as view:
        try:
            outcome = execute(run, plan, site, _rows(arguments, view))
        except Interrupted as error:  # whose hint is for those who have a recipe
            words = shlex.join(["harness", "run", plan.recipe_path, "--out", str(arguments.out), "--resume"])
            raise Interrupted(error.message, details=error.details, hint=f"go on with `{words}`") from error
    return _finish(arguments, run, outcome.troubles)


def _planned(folder: Path, recipe: dict[str, Any], site: "Site") -> "Plan":
    """The plan of a recipe, which is then kept as a file of its own; one that is wrong leaves no file.

    Raises:
        InputError: every fault of the command line that only a recipe's rules find.
    """
    from harness.recipe import expand
    from harness.recipe import plan as planning
    from harness.recipe.gather import gather

    path, fresh = _kept(folder, recipe["recipe"], _yaml(recipe))
    try:
        expanded = expand.load(path)
        return planning.make(expanded, gather(expanded, site))
    except InputError as error:
        if fresh:
            path.unlink()
        raise (InputError.of([_of_theirs(fault, path) for fault in error.faults]) if error.faults else error) from error


def _of_theirs(fault: Fault, recipe: Path) -> Fault:
    """A fault without a place in the recipe, which they never saw; one in a file of theirs keeps its place."""
    ours = fault.where is not None and Path(fault.where.path).absolute() == recipe.absolute()
    return replace(fault, where=None) if ours else fault


def _kept(folder: Path, name: str, text: str) -> tuple[Path, bool]:
    """The file that holds a recipe, and whether it is new: the same recipe is kept once, and no other is lost."""
    from harness.files import write_atomic

    for number in itertools.count(1):
        path = folder / (f"{name}.yaml" if number == 1 else f"{name}-{number}.yaml")
        if not path.exists():
            write_atomic(path, text)
            return path, True
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            return path, False
    raise AssertionError("numbers do not end")


def recipe_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The recipe that a command line stands for.

    Raises:
        InputError: an option makes no sense; every fault at once.
    """
    faults: list[Fault] = []
    where, port = _split(arguments.url, faults)
    if (arguments.ca_file or arguments.insecure) and where.scheme != "https":
        faults.append(Fault("--ca-file and --insecure are for https", hint=f"`{arguments.url}` is not encrypted"))
    if where.path not in {"", "/"}:
        hint = "give the server's address alone; --dialect says which path is asked"
        faults.append(Fault(f"`{arguments.url}` has a path", hint=hint))
    if where.query or where.fragment:
        faults.append(Fault(f"`{arguments.url}` has a query", hint="give the server's address alone"))
    sweep = _sweep(arguments, faults)
    faults += [
        Fault(f"--{name.replace('_', '-')} must be a finite number, got {value}")
        for name in ("duration", "temperature", "burstiness", "ramp_up")
        if isinstance(value := getattr(arguments, name) or 0.0, float) and not math.isfinite(value)
    ]
    for name in ("requests", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            faults.append(Fault(f"--{name.replace('_', '-')} must be at least 1, got {value}"))
    if faults:
        raise InputError.of(faults)
    return {
        "recipe": f"bench-{where.hostname}-{port or where.scheme}".replace(":", "-"),
        "question": f"What does the server at {arguments.url} do?",
        "server": {"engine": "attach", "url": f"{where.scheme}://{where.netloc}", **_trust(arguments)},
        "workload": {
            "prompts": _prompts(arguments.prompts),
            "max_tokens": arguments.max_tokens,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "ignore_eos": not arguments.stop_early,
            "dialect": arguments.dialect,
        },
        "warmup": {"requests": arguments.warmup, "level_requests": 0},
        "sweep": sweep,
        "timeouts": {"start_s": 10.0},
    }


def _split(url: str, faults: list[Fault]) -> tuple[SplitResult, int | None]:
    """A URL's parts and its port, None where it names none."""
    try:
        where = urlsplit(url if "//" in url else f"http://{url}")
    except ValueError as error:  # a bracket that is never closed
        faults.append(Fault(f"`{url}` is not a URL: {error}", hint="like http://127.0.0.1:8000 or http://[::1]:8000"))
        return urlsplit("http://unknown"), None
    if where.scheme not in {"http", "https"} or not where.hostname:
        faults.append(Fault(f"`{url}` is not a URL of a server", hint="like http://127.0.0.1:8000"))
    try:
        return where, where.port
    except ValueError:
        faults.append(Fault(f"`{url}` has no valid port"))
        return where, None


def _trust(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.ca_file:
        return {"ca_file": str(arguments.ca_file.resolve())}
    return {"insecure": True} if arguments.insecure else {}


def _sweep(arguments: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    if arguments.rate is not None and arguments.concurrency is not None:
        faults.append(Fault("--rate and --concurrency exclude each other"))
    sweep: dict[str, Any] = {}
    if arguments.rate is not None:
        sweep |= {"rate": _numbers("--rate", arguments.rate, float, faults), "burstiness": arguments.burstiness}
    else:
        levels = "1,2,5,10" if arguments.concurrency is None else arguments.concurrency
        sweep["concurrency"] = _numbers("--concurrency", levels, int, faults)
    if arguments.requests is not None:
        sweep["requests"] = arguments.requests
    if arguments.duration is not None:
        sweep["duration_s"] = arguments.duration
    if arguments.ramp_up is not None:
        sweep["ramp_up_s"] = arguments.ramp_up
    if arguments.goodput:
        sweep["goodput"] = _objectives(arguments.goodput, faults)
    return sweep


def _objectives(words: Sequence[str], faults: list[Fault]) -> dict[str, float]:
    """`ttft:500` in milliseconds, as peers write it, to `ttft_s: 0.5`."""
    objectives = {}
    for word in (part.strip() for each in words for part in each.split(",")):
        name, _, text = word.partition(":")
        if name not in {"ttft", "tpot", "e2e"}:
            faults.append(Fault(f"--goodput: `{word}` names no objective", hint="ttft, tpot or e2e, as in ttft:500"))
            continue
        (milliseconds,) = _numbers("--goodput", text, float, faults)
        objectives[f"{name}_s"] = milliseconds / 1000
    return objectives


def _burstiness(text: str) -> float | str:
    return text if text == "constant" else float(text)


def _numbers(option: str, text: str, kind: type[int] | type[float], faults: list[Fault]) -> list[float]:
    numbers: list[float] = []
    for part in text.split(","):
        try:
            value = kind(part)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            what = "a whole number above zero" if kind is int else "a number above zero"
            faults.append(Fault(f"{option}: `{part.strip()}` is not {what}"))
        numbers.append(value)
    return numbers


def _prompts(name: str) -> str:
    """A file is named from the working directory, as everything on a command line is."""
    return str(Path(name).resolve()) if Path(name).is_file() else name


def _yaml(recipe: dict[str, Any]) -> str:
    from io import StringIO

    from ruamel.yaml import YAML

    text = StringIO()
    YAML(typ="safe").dump(recipe, text)
    return "# written by `harness bench`; `harness run` does the same again\n" + text.getvalue()


def _rows(arguments: argparse.Namespace, view: "LiveView") -> "Tell":
    """Print each level's row as it ends: the answer as far as it goes, on stdout."""
    from harness.publish.tables import seeds_row

    def told(kind: str, **facts: Any) -> None:
        if kind == "level-done" and not arguments.talk.as_json:
            simulated = " | simulated" if facts["result"].simulated else ""
            with view.aside():
                sys.stdout.write(f"{seeds_row(facts['result'])}{simulated}\n")
                sys.stdout.flush()
            if not view.drawn:
                return
        view.tell(kind, **facts)

    return told


def _finish(arguments: argparse.Namespace, run: "Run", troubles: tuple[str, ...]) -> int:
    from harness.publish.tables import levels_table
    from harness.run.facts import busy_before

    results = [result for _, result in run.levels()]
    levels = [result.model_dump(mode="json") for result in results]
    data = {"run": str(run.path), "suspect": busy_before(run.facts()), "levels": levels}
    label = " (simulated)" if any(result.simulated for result in results) else ""
    arguments.talk.data(data, levels_table(results, f"run {run.run_id}{label}"))
    for result in results:
        for reason in result.verdict.reasons:
            arguments.talk.line(f"{result.level['name']}: {result.verdict.state}: {reason.message}")
    bad = [str(result.level["name"]) for result in results if result.verdict.state == "invalid"]
    if bad or troubles:
        raise MeasurementError(
            f"run `{run.run_id}` ended, but not every level counts",
            details=[*troubles, *(f"invalid: {name}" for name in bad)],
            hint=f"`harness show {run.path}` says why",
        )
    return 0
