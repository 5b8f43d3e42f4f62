"""The faults: what is broken, and what must come out. `test_faults.py` breaks each, looks, and resumes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.publish.tables import markdown_table


@dataclass(frozen=True)
class Case:
    """One fault.

    `breaks` are words for `driver.py`. `exit` is the exit code, 137 for a harness that was killed. `says` must be found
    in what the user sees. `changes` are laid over the recipe. `whole` says that the run needs no resuming, `marked`
    that its numbers stand, but as suspect ones; `real` that the server is llama.cpp, not the simulated one.
    """

    name: str
    what: str
    breaks: tuple[str, ...]
    exit: int
    says: str
    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    marked: bool = False
    real: bool = False


LATER = "argument:fault-from=6"  # past the proof of readiness, the warm-up and the first level's first requests
ONCE = "argument:fault-count=1"


def cases() -> Iterator[Case]:
    """Every fault of the matrix."""
    yield from starts()
    yield from deaths()
    yield from answers()
    yield from kills()
    yield from stubborn()
    yield from machine()
    yield from policies()
    yield from real()


def starts() -> Iterator[Case]:
    """Servers that do not come up."""
    group = "a server that does not come up"

    def dies(name: str, line: str, says: str) -> Case:
        return Case(name, f"it writes `{line}` and dies", (f"server:die-before-ready={line}",), 5, says, group)

    short = {"timeouts": {"request_s": 2, "start_s": 5}}
    yield Case(
        "never-listens", "it never opens its port", ("server:never-listens",), 5, "did not start: .*", group, short
    )
    yield Case(
        "never-healthy", "/health says 503 for ever", ("server:never-healthy",), 5, "did not start: .*", group, short
    )
    yield Case("slow-start", "it takes 3 s longer", ("server:slow-start=3",), 0, "ready after [3-9]", group, whole=True)
    yield Case(
        "hangs-in-nccl",
        "it waits for the other ranks for ever",
        ("server:hang-before-ready=NCCL INFO Channel 00/0 : 0[0] -> 1[1]",),
        5,
        "did not start: NCCL hang",
        group,
        short,
    )
    yield dies(
        "undefined-symbol",
        "ImportError: common_ops.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib",
        r"did not start: kernel built for another torch \(exit 1\)",
    )
    yield dies(
        "no-kernel-image",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "did not start: no kernel image",
    )
    yield dies(
        "cuda-oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA out of memory"
    )
    yield dies("unsupported-arch", "RuntimeError: Unsupported architecture", "did not start: unsupported architecture")
    yield dies(
        "ptxas", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "did not start: ptxas too old"
    )
    yield dies("tokenizer", "OSError: Can't load tokenizer for '/models/x'.", "did not start: tokenizer missing")
    yield dies(
        "model", "HFValidationError: Repo id must use alphanumeric chars: '/x'", "did not start: model not found"
    )
    yield dies(
        "nccl-timeout", "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)", "NCCL timeout"
    )
    yield dies("wrong-cuda", "ImportError: libnvrtc.so.12: cannot open shared object file", "library of another CUDA")
    yield dies("unknown-death", "nobody knows this line", r"did not start: unknown \(ended with 1\)")
    yield Case(
        "bad-flag", "its version does not know a flag", ("argument:draft-max=4",), 5, "did not start: bad flag", group
    )
    yield Case(
        "port-lost",
        "a stranger takes the port between choice and use, three times",
        ("squat",),
        5,
        "did not start: port in use",
        group,
    )
    yield Case("mute", "it is healthy and generates nothing", ("server:zero-tokens",), 5, "gave no token", group)
    yield Case("refusing", "every generation gets a 503", ("server:status=503",), 5, "generation got HTTP 503", group)


def deaths() -> Iterator[Case]:
    """Servers that die or freeze while they are measured."""
    group = "a server that fails while it is measured"
    yield Case(
        "killed-mid-level",
        "SIGKILL to the server in the second level",
        ("server:die-after-requests=14",),
        5,
        r"died in `01-plain` at c4: .*SIGKILL.*",
        group,
    )
    yield Case(
        "crash-mid-level",
        "a CUDA error ends it in the first level",
        ("server:crash-after-tokens=70",),
        5,
        "died in `01-plain` at c1: illegal memory access",
        group,
    )
    yield Case(
        "second-launch-dies",
        "the second launch dies, the first was good",
        ("server2:die-after-requests=8",),
        5,
        "died in `02-drafted` at c1",
        group,
    )
    yield Case(
        "dies-in-warm-up",
        "it dies at the first request after it was ready",
        ("server:die-after-requests=2",),
        5,
        "every warm-up request failed: the server is dead",
        group,
    )
    yield Case(
        "restarts",
        "it starts anew under its own pid",
        ("server:restart-after-requests=8",),
        6,
        "requests failed: .*connect.*",
        group,
        {"sweep": {"concurrency": [1], "requests": 8}},
    )
    yield Case(
        "freezes",
        "it stays healthy and generates nothing more",
        ("server:freeze-after-tokens=60",),
        6,
        "requests failed: .*timeout.*",
        group,
        {"timeouts": {"request_s": 1, "start_s": 15}},
    )
    yield Case(
        "loses-a-worker",
        "a child of it crashes, unnoticed; it stays healthy and generates nothing more",
        ("server:lose-worker-after-tokens=60",),
        5,
        "a child process crashed",
        group,
        {"timeouts": {"request_s": 60, "start_s": 61}},
    )
    yield Case(
        "many-streams",
        "it dies with 1,000 streams open",
        ("server:die-after-tokens=2000",),
        5,
        "died in `01-plain` at c1000",
        group,
        {
            "arms": {"plain": {}},
            "sweep": {"concurrency": [1000], "requests": 1000},
            "timeouts": {"request_s": 60, "start_s": 61},
        },
    )


def answers() -> Iterator[Case]:
    """Answers that are no samples."""
    group = "an answer that is no sample"

    def wrong(name: str, what: str, fault: str, says: str, *more: str) -> Case:
        return Case(name, what, (f"server:{fault}", LATER, *more), 6, says, group)

    yield wrong("http-500", "one request gets a 500", "status=500", "1 of 8 requests failed: 1 status", ONCE)
    yield wrong("http-429", "requests get a 429", "status=429", "requests failed: [0-9]+ status.*")
    yield wrong("http-503", "requests get a 503", "status=503", "requests failed: [0-9]+ status.*")
    yield wrong("silence", "one request gets no answer at all", "no-answer", "1 of 8 requests failed: 1 timeout", ONCE)
    yield wrong(
        "hang-after-headers", "headers, then nothing", "hang-after-headers", "1 of 8 requests failed: 1 timeout", ONCE
    )
    yield wrong(
        "hang-mid-stream", "half a stream, then nothing", "hang-mid-stream", "1 of 8 requests failed: 1 timeout", ONCE
    )
    yield wrong("truncated", "streams end half-way", "truncated", "requests failed: .*")
    yield wrong("reset", "connections are reset inside a chunk", "reset-mid-chunk", "requests failed: .*")
    yield wrong("error-event", "an error event inside a 200 stream", "error-event", "requests failed: .*error.*")
    yield wrong("garbage", "bytes that are not HTTP chunks", "garbage", "requests failed: .*")
    yield wrong("garbage-json", "events that are not JSON", "garbage-json", "requests failed: .*")
    yield wrong("zero-tokens", "streams end properly without a token", "zero-tokens", "requests failed: .*")
    yield wrong("aborted", "streams end with finish_reason abort", "abort", "requests failed: .*")
    yield wrong(
        "no-end",
        "streams say no finish_reason and no [DONE]",
        "no-finish",
        "requests failed: .*early.*",
        "server:no-done",
    )

    def odd(name: str, what: str, fault: str, says: str) -> Case:
        return Case(name, what, (f"server:{fault}", LATER), 0, says, group, marked=True)

    yield odd(
        "early-stop", "half of the tokens, finish_reason stop", "early-stop", "suspect: .* another length than 10.*"
    )
    yield wrong("cached", "prompt tokens come from a cache", "warm-cache=64", ".* prompt tokens came from the cache.*")
    counts = "suspect: .* output tokens by the server's metrics"
    yield odd("wrong-usage", "usage counts 7 tokens too many", "wrong-usage", counts)


def kills() -> Iterator[Case]:
    """A harness that is killed or told to stop, in every phase."""
    killed = "a harness that is killed (SIGKILL)"
    for phase, what in (
        ("plan", "the plan was just written"),
        ("launch", "the server was just started"),
        ("warm-up", "in the warm-up"),
        ("level", "in the middle of a level"),
        ("level-done", "a level was just written"),
        ("teardown", "while the server is stopped"),
        ("answer", "before the comparison"),
    ):
        yield Case(f"killed-in-{phase}", what, (f"kill:{phase}",), 137, "", killed)
    yield Case("torn-line", "half-way through a line of requests.jsonl", ("torn:requests",), 137, "", killed)
    told = "a harness that is told to stop"
    for phase, what in (("launch", "while the server starts"), ("level", "in the middle of a level")):
        name = f"interrupted-in-{phase}"
        breaks = (f"interrupt:{phase}", *(("server:slow-start=3",) if phase == "launch" else ()))
        yield Case(name, f"Ctrl-C {what}", breaks, 130, "hint: go on with `--resume`", told)
    yield Case(
        "interrupted-twice",
        "Ctrl-C twice in a level",
        ("interrupt:level*2",),
        130,
        "(?m)error: stopped.*|^interrupted$",
        told,
    )
    yield Case("terminated", "SIGTERM in a level", ("terminate:level",), 130, "hint: go on with `--resume`", told)


def stubborn() -> Iterator[Case]:
    """Servers that do not want to go."""
    group = "a server that does not want to go"
    yield Case(
        "setsid-child",
        "a child in its own session ignores TERM",
        ("server:setsid-child",),
        0,
        "nothing left",
        group,
        whole=True,
    )
    yield Case(
        "ignores-term", "it ignores every polite signal", ("server:ignore-term",), 0, "nothing left", group, whole=True
    )
    yield Case(
        "dies-at-stop",
        "it exits with 1 when asked to stop",
        ("server:die-at-stop",),
        0,
        "nothing left",
        group,
        whole=True,
    )
    yield Case(
        "killed-with-setsid-child",
        "the harness is killed, a child in its own session ignores TERM",
        ("kill:level", "server:setsid-child"),
        137,
        "",
        group,
    )
    yield Case(
        "interrupted-and-ignores-term",
        "Ctrl-C, and the server ignores every polite signal",
        ("interrupt:level", "server:ignore-term"),
        130,
        "nothing left",
        group,
    )


def machine() -> Iterator[Case]:
    """Disk, clock, ports."""
    group = "the machine"
    full = "No space left on device"
    yield Case("disk-full-client", "the disk is full while a level runs", ("full:spool0",), 2, full, group)
    yield Case(
        "disk-full-requests", "the disk is full when requests are stored", ("full:requests.jsonl",), 2, full, group
    )
    yield Case("disk-full-level", "the disk is full when a level is stored", ("full:level.json",), 2, full, group)
    yield Case("disk-full-launch", "the disk is full when a launch is stored", ("full:launch.json",), 2, full, group)
    yield Case(
        "clock-back", "the wall clock steps back an hour in a level", ("clock:-3600",), 0, "8/8", group, whole=True
    )
    yield Case(
        "no-metrics",
        "/metrics is not there",
        ("server:no-metrics",),
        0,
        "8/8",
        group,
        {"arms": {"plain": {}}},
        whole=True,
    )
    yield Case(
        "bad-metrics",
        "/metrics is not metrics",
        ("server:bad-metrics",),
        0,
        "8/8",
        group,
        {"arms": {"plain": {}}},
        whole=True,
    )


def policies() -> Iterator[Case]:
    """What the recipe says to do when a server dies."""
    group = "a recipe that goes on after a death"
    yield Case(
        "relaunch",
        "the first server dies in its first level, `on_failure: relaunch-and-continue`",
        ("server1:die-after-requests=8",),
        0,
        "warning: .* died in `01-plain` at c1: .*measured again",
        group,
        {"on_failure": "relaunch-and-continue"},
        whole=True,
    )
    yield Case(
        "relaunch-in-vain",
        "every server of a launch dies in the same level, `on_failure: relaunch-and-continue`",
        ("server:die-after-requests=8",),
        6,
        "invalid: 01-plain c1",
        group,
        {"on_failure": "relaunch-and-continue"},
    )
    yield Case(
        "skip-level",
        "the first server dies in its first level, `on_failure: skip-level`",
        ("server1:die-after-requests=8",),
        6,
        "invalid: 01-plain c1",
        group,
        {"on_failure": "skip-level"},
    )


def real() -> Iterator[Case]:
    """The same on a real server: llama.cpp with a tiny random model."""
    group = "a real server: llama.cpp with a tiny random model"
    yield Case("real-killed-in-level", "the harness is killed in a level", ("kill:level",), 137, "", group, real=True)
    yield Case(
        "real-interrupted-in-level",
        "Ctrl-C in a level",
        ("interrupt:level",),
        130,
        "hint: go on with `--resume`",
        group,
        real=True,
    )
    yield Case(
        "real-server-killed",
        "SIGKILL to the server in the second level",
        ("kill-server:level",),
        5,
        "died in `01-plain` at c2: .*",
        group,
        real=True,
    )
    yield Case(
        "real-port-lost",
        "a stranger takes the port between choice and use, three times",
        ("squat",),
        5,
        "did not start: port in use",
        group,
        real=True,
    )


CASES = list(cases())
# One or two of a kind: these run with every other test, all of them in `nox -s faults`.
SAMPLE = {
    "undefined-symbol",
    "never-healthy",
    "killed-mid-level",
    "dies-in-warm-up",
    "http-500",
    "reset",
    "killed-in-launch",
    "killed-in-level",
    "interrupted-in-level",
    "setsid-child",
    "disk-full-level",
    "relaunch",
    "real-killed-in-level",
}


@dataclass(frozen=True)
class Outcome:
    """What came out: exit code, what the user was told, and what it took to make the run whole."""

    exit: int
    said: str
    after: str


def markdown(outcomes: Sequence[tuple[Case, Outcome]]) -> str:
    """The fault table as Markdown, a table a group."""
    lines: list[str] = []
    for group in dict.fromkeys(case.group for case, _ in outcomes):
        lines += ["", f"### {group[0].upper()}{group[1:]}", ""]
        rows = [row(case, outcome) for case, outcome in outcomes if case.group == group]
        table = markdown_table(("fault", "what is broken", "exit", "the user reads", "afterwards"), rows)
        lines += [table[0], table[1].replace("---:", "---"), *table[2:]]
    total = len(outcomes)
    return "\n".join(
        [f"{total} faults; after every one of them nothing was left running and nothing stored was lost.", *lines]
    )


def row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    """One line of the fault table."""
    said = f"`{outcome.said.replace('`', '')}`" if outcome.said else "-"
    return (case.name, case.what.replace("`", ""), str(outcome.exit), said, outcome.after)
