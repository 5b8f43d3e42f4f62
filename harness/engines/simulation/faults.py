"""What can be made to go wrong in a simulated server, by name: `--fault NAME` or `--fault NAME=VALUE`, repeatable.

Faults of a request hit those whose number (from 0, generations only) is at least `--fault-from`, every
`--fault-every`-th of them, and no more than `--fault-count`.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Read = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One fault: what it does, and how its value is read (None: it takes none)."""

    does: str
    read: Read | None = None
    default: Any = True


PROCESS: Mapping[str, Kind] = {
    "never-listens": Kind("the port is never opened"),
    "never-healthy": Kind("/health says 503 for ever"),
    "slow-start": Kind("seconds more until it is ready", float, 5.0),
    "die-before-ready": Kind("prints the value and exits with 1 while loading", str, "simulated: fatal error"),
    "hang-before-ready": Kind(
        "prints the value while loading and never gets ready", str, "simulated: waiting for rank 7"
    ),
    "die-at-stop": Kind("exits with 1 when asked to stop"),
    "ignore-term": Kind("SIGTERM and SIGINT do nothing"),
    "drain-on-term": Kind("SIGTERM waits for open streams, without limit"),
    "setsid-child": Kind("starts a child in a session of its own that ignores SIGTERM; seconds it lives", float, 300.0),
    "die-after-requests": Kind("SIGKILLs itself when so many generations have arrived", int, 1),
    "die-after-tokens": Kind("SIGKILLs itself when so many tokens were generated", int, 1),
    "crash-after-tokens": Kind("prints a CUDA error and exits with 1 when so many tokens were generated", int, 1),
    "restart-after-requests": Kind(
        "starts anew under its own pid, once, when so many generations have arrived", int, 1
    ),
    "freeze-after-tokens": Kind("generates nothing more after so many tokens, and stays healthy", int, 1),
    "lose-worker-after-tokens": Kind(
        "a child crashes after so many tokens, unnoticed: it generates nothing more, and stays healthy", int, 1
    ),
    "slow-after-tokens": Kind("steps take twice as long after so many tokens", int, 1),
    "slow-decode": Kind("steps take so many times as long from the start", float, 4.0),
    "no-metrics": Kind("/metrics says 404"),
    "bad-metrics": Kind("/metrics says something that is not metrics"),
    "flush-fails": Kind("/flush_cache says 500"),
    "wrong-model": Kind("/v1/models lists another model, as a stranger's server would"),
    "warm-cache": Kind("reports so many cached prompt tokens, whatever was cached", int, 16),
}
REQUEST: Mapping[str, Kind] = {
    "status": Kind("answers with this HTTP status", int, 500),
    "no-answer": Kind("sends nothing at all and keeps the connection"),
    "hang-after-headers": Kind("sends headers and nothing more"),
    "hang-mid-stream": Kind("stops sending half-way and keeps the connection"),
    "truncated": Kind("ends the connection half-way, without an end to the stream"),
    "reset-mid-chunk": Kind("resets the connection inside a chunk"),
    "error-event": Kind("sends an error event half-way, then [DONE]"),
    "garbage": Kind("sends bytes that are not HTTP chunks half-way"),
    "garbage-json": Kind("sends an event half-way that is not JSON"),
    "zero-tokens": Kind("ends properly without a token"),
    "abort": Kind("ends half-way with finish_reason abort"),
    "wrong-length": Kind("ends half-way with finish_reason length"),
    "early-stop": Kind("ends half-way with finish_reason stop"),
    "no-finish": Kind("never says a finish_reason"),
    "no-usage": Kind("never says usage"),
    "wrong-usage": Kind("usage counts so many tokens too many", int, 7),
    "no-done": Kind("leaves [DONE] out"),
}
HALF_WAY = ("hang-mid-stream", "truncated", "reset-mid-chunk", "error-event", "garbage", "garbage-json")


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one server."""

    chosen: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    every: int = 1
    count: int | None = None

    def get(self, name: str) -> Any:
        """The value of a process fault; None when it was not asked for."""
        return self.chosen.get(name) if name in PROCESS else None

    def of_request(self, number: int) -> Mapping[str, Any]:
        """The faults that hit the request of this number."""
        place, rest = divmod(number - self.first, self.every)
        if number < self.first or rest or (self.count is not None and place >= self.count):
            return {}
        return {name: value for name, value in self.chosen.items() if name in REQUEST}


def read(words: Sequence[str], *, first: int = 0, every: int = 1, count: int | None = None) -> Faults:
    """Faults from `NAME` and `NAME=VALUE`.

    Raises:
        ValueError: an unknown name, or a value that cannot be read.
    """
    chosen = dict(_one(word) for word in words)
    return Faults(chosen, first, max(1, every), count)


def table() -> str:
    """All faults, a line each."""
    return "\n".join(
        f"  {name:<26}{kind.does}" + (f" (default {kind.default})" if kind.read else "")
        for name, kind in {**PROCESS, **REQUEST}.items()
    )


def _one(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    kind = PROCESS.get(name) or REQUEST.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, [*PROCESS, *REQUEST], n=1)
        raise ValueError(f"no fault is called `{name}`" + (f", did you mean `{near[0]}`?" if near else ""))
    if not equals:
        return name, kind.default
    if kind.read is None:
        raise ValueError(f"fault `{name}` takes no value, got `{value}`")
    try:
        return name, kind.read(value)
    except ValueError as error:
        raise ValueError(f"fault `{name}` takes {_noun(kind.read)}, got `{value}`") from error


def _noun(read_value: Read) -> str:
    return {int: "a whole number", float: "a number"}.get(read_value, "a text")  # type: ignore[call-overload,no-any-return]
