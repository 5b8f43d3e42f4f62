"""What an engine is: data in, argv, paths and meanings out. Nothing here starts a process or opens a socket.

`run` does the acting: it starts `Command`s, asks `paths`, and hands the answers back to the engine to be understood.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Scalar = str | int | float | bool | None
Dialect = Literal["chat", "completions", "generate"]


@dataclass(frozen=True, slots=True)
class Model:
    """The model a server is to serve: a local path and the name requests use."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Tls:
    """How an encrypted server is trusted: by the system's authorities, by those in `ca_file`, or without asking."""

    ca_file: str | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """One server as the plan resolved it.

    `args` are the engine's own long flag names without dashes, in the recipe's order; True is a bare flag, None and
    False leave it out, a list repeats or joins as the engine wants. `python` is the interpreter of the built
    environment, None for an engine that needs none. `unchecked` goes to the end of the argv as it is. `tls` is for one
    that runs already and is encrypted; those that we start speak plain HTTP. `cpus` are those it may run on, empty for
    all that we may.
    """

    engine: str
    host: str
    port: int
    model: Model | None = None
    args: Mapping[str, Scalar | Sequence[Scalar]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    unchecked: tuple[str, ...] = ()
    tls: Tls | None = None
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One machine's place in a server that spans several: which of how many, and where rank 0 meets the others.

    `host` and `port` are rank 0's, the same for all; rank 0 has proven that it may listen there.
    """

    rank: int
    nodes: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """`HOST:PORT`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute, without a shell, and on which CPUs (empty: all that we may use)."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """How this engine likes to be stopped: which signal first, and how long it may take."""

    signals: tuple[str, ...] = ("SIGTERM",)
    grace_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Names on `/metrics` for what we read as deltas or gauges; None where the engine does not say.

    Counter names are as prometheus_client's parser gives samples (with `_total` where the server writes it).
    """

    prompt_tokens: str | None = None
    generated_tokens: str | None = None
    drafts: str | None = None
    draft_tokens: str | None = None
    accepted_tokens: str | None = None
    cached_tokens: str | None = None
    preemptions: str | None = None
    running: str | None = None
    waiting: str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """A log line that says how a server died or will die (`regex`, Python syntax), and what to do about it.

    `decisive`: a server that writes this line while it starts will never serve, however long it lives on: waiting ends
    at once. A line that some servers survive must not say so; it explains a death only after it happened.
    `of_a_peer`: this machine's part went because another's had: that one's log says why.
    """

    name: str
    regex: str
    remedy: str
    retry: bool = False
    source: str = ""
    decisive: bool = False
    of_a_peer: bool = False


@dataclass(frozen=True, slots=True)
class Milestone:
    """A log line worth showing while a server starts."""

    name: str
    regex: str


@dataclass(frozen=True, slots=True)
class LogFigures:
    """Log lines that carry figures of speed: regular expressions with a group `value`, None where no line does.

    A group `who` tells several writers within one process apart.

    Attributes:
        rate: output tok/s, the mean since the line before.
        tokens: the output tokens of one request that ended.
        acceptance: tokens a verification step, bonus token included, the mean since the line before.
    """

    rate: str | None = None
    tokens: str | None = None
    acceptance: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, pinned for a whole run and echoed in its record."""

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    top_p: float | None = None
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether a promised feature engaged: True or False with the lines that show it, None when it cannot be told."""

    feature: str
    engaged: bool | None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """What one launch showed, for judging features: answers by path, log text, counter deltas by metric name."""

    answers: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    deltas: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One serving engine. All members are pure.

    `rank_ports` is how many consecutive ports a server that spans machines takes where rank 0 meets the others; 0 says
    that this engine runs on one machine only. `address_variable` tells each of its machines its own address, None where
    the engine finds that out or needs no telling.
    """

    name: str
    simulated: bool
    needs_environment: bool
    needs_model: bool
    ready_path: str
    models_path: str
    metrics_path: str | None
    effective_paths: tuple[str, ...]
    flush: tuple[str, str] | None
    counters: Counters
    features: tuple[str, ...]
    signatures: tuple[Signature, ...]
    milestones: tuple[Milestone, ...]
    figures: LogFigures
    stop: StopPolicy
    rank_ports: int
    address_variable: str | None

    def command(self, server: Server) -> Command:
        """Argv and variables that start this server."""
        ...

    def rank_args(self, rank: Rank) -> dict[str, Scalar]:
        """The arguments, beside the recipe's, that start one machine's part of a server that spans several.

        Raises:
            InputError: this engine runs on one machine only.
        """
        ...

    def request(self, dialect: Dialect, prompt: Any, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of one streaming request; `prompt` is a text or a list of chat messages."""
        ...

    def effective(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration the server says it runs with, flat as `name: scalar`, from `effective_paths` answers."""
        ...

    def evidence(self, feature: str, observed: Observed) -> Evidence:
        """Whether a feature engaged."""
        ...


@runtime_checkable
class Profiles(Protocol):
    """What an engine has beside the rest if its server can trace itself while it serves."""

    stop_profile: str  # the path to POST to, which answers when the trace is written

    def start_profile(self, folder: str) -> tuple[str, dict[str, Any]]:
        """Path and JSON body that begin a trace, to be written into this folder of the server's machine."""
        ...
