"""The recipe file: what people write to say what is to be measured. Strict; positions are kept by `harness.strict`."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from harness.strict import Strict

Scalar = str | int | float | bool | None
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]


class ModelFile(Strict):
    """The model to serve: a path on this site, or a file that a locked package of the environment carries."""

    path: str | None = Field(default=None, description="file or folder; `${VAR}` takes a site fact")
    from_env: str | None = Field(default=None, description="path below the environment's site-packages")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="checked before launch")
    name: str | None = Field(default=None, description="what requests call it; default: the file's name")
    revision: str | None = Field(default=None, description="commit or tag of the model, for the record")
    family: str | None = Field(default=None, description="for rules: kimi-k2.5, llama, ...")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.from_env is None):
            raise ValueError("exactly one of `path` and `from_env` says where the model is")
        return self


class ServerSection(Strict):
    """One server: its engine and what it is started with."""

    engine: str = Field(description="sglang, vllm, llamacpp, simulated, or attach: one that already runs")
    args: dict[str, Scalar | list[Scalar]] = Field(default={}, description="the engine's long flags without dashes")
    unchecked: list[str] = Field(default=[], description="arguments passed as they are, never checked")
    variables: dict[str, str] = Field(default={}, description="environment variables of the server")
    secrets: list[str] = Field(default=[], description="names of variables passed through and never stored")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    nodes: Annotated[int, Field(ge=1, le=1024)] = Field(default=1, description="machines that one server spans")
    port: int | None = Field(default=None, ge=1, le=65535, description="default: a free one")
    url: str | None = Field(
        default=None, pattern=r"^https?://[^/?#]+/?$", description="engine `attach`: where the running server is"
    )
    ca_file: str | None = Field(default=None, description="https: certificate of the authority, beside the recipe")
    insecure: bool = Field(default=False, description="https: believe any certificate")


class Workload(Strict):
    """What is asked of the server."""

    prompts: str = Field(description="a prompt set in recipes/prompts, or a JSONL file")
    max_tokens: Count = Field(description="output tokens of a request at most; exactly, with `ignore_eos`")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy, so that outputs can be compared")
    seed: int | None = Field(default=0, description="of sampling, where the engine takes one")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling; default: the engine's")
    ignore_eos: bool = Field(default=True, description="every answer has `max_tokens` tokens")
    dialect: Literal["chat", "completions", "generate"] = Field(
        default="chat", description="which of the engine's interfaces is asked"
    )
    cold: bool = Field(default=True, description="no prompt may be in the server's prefix cache")
    keep_text: bool = Field(default=True, description="store answers, for output equivalence")


class Warmup(Strict):
    """Requests that are not measured: before the first level, and at the head of every level."""

    requests: int = Field(default=5, ge=0, description="after launch, before the first level, at concurrency 1")
    level_requests: int | None = Field(default=None, ge=0, description="at each level's head; default: its concurrency")
    drain: bool = Field(default=False, description="end the level's warm-up before measuring")


class Objectives(Strict):
    """What a request must keep to count for goodput."""

    ttft_s: Seconds | None = Field(default=None, description="time to first token at most, seconds")
    tpot_s: Seconds | None = Field(default=None, description="time per output token at most, seconds")
    e2e_s: Seconds | None = Field(default=None, description="end to end at most, seconds")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError("no objective: give `ttft_s`, `tpot_s` or `e2e_s`")
        return self


class Sweep(Strict):
    """The load levels of one launch. Exactly one of `concurrency`, `rate` and `serial` says what a level is."""

    concurrency: list[Count] | None = Field(
        default=None, min_length=1, description="closed loop: requests in flight, a level each"
    )
    rate: list[Seconds] | None = Field(default=None, min_length=1, description="requests a second, open loop")
    serial: Count | None = Field(default=None, description="requests one after another, with nothing beside them")
    requests: Count | None = Field(default=None, description="per level; default max(30, 4*C)")
    duration_s: Seconds | None = Field(default=None, description="per level; with `requests`, whichever comes first")
    burstiness: Seconds | Literal["constant"] = Field(
        default=1.0, description="open loop: 1 is Poisson, larger is more regular, `constant` wholly so"
    )
    ramp_up_s: Seconds | None = Field(
        default=None, description="closed loop: its slots begin one after another over this time, not all at once"
    )
    goodput: Objectives | None = Field(default=None, description="objectives; requests that keep them all are counted")
    order: Literal["ascending", "shuffled"] = Field(default="ascending", description="of the levels of one launch")
    stop_when_saturated: bool = Field(
        default=False,
        description="leave higher levels out once two steps up bought less than 2 % and only raised TTFT, or a rate "
        "outran the server",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("concurrency", "rate") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError("`concurrency` and `rate` exclude each other")
        if not given and self.serial is None:
            raise ValueError("no level: give `concurrency`, `rate` or `serial`")
        if self.ramp_up_s is not None and not self.concurrency:
            raise ValueError("`ramp_up_s` is about the slots of a closed loop: it goes with `concurrency`")
        if self.stop_when_saturated and (self.order != "ascending" or not (self.concurrency or self.rate)):
            raise ValueError("`stop_when_saturated` needs `concurrency` or `rate` in ascending order")
        for name in given:
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"`{name}` names a level twice")
        return self


class Client(Strict):
    """Where the load comes from. Not part of a cell's identity: the record says where it came from."""

    node: Literal["head", "separate"] = Field(
        default="head", description="the server's first machine, or one of its own that no server runs on"
    )
    processes: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="default: as many as needed"
    )
    nodes: Annotated[int, Field(ge=1, le=256)] = Field(default=1, description="machines that offer the load together")


class Compare(Strict):
    """Which arms are compared, what they may differ in, and how often each is launched."""

    base: str = Field(description="the arm that others are compared against")
    treatment: list[str] = Field(default=[], description="patterns of what may differ; default: what the arms set")
    accept: list[str] = Field(
        default=[], description="effective settings that may differ because the treatment moves them"
    )
    launches: int = Field(default=1, ge=1, le=1000, description="servers started for each arm; intervals need two")
    order: Literal["abba", "random"] = Field(default="abba", description="of the arms within each block of launches")
    same_nodes: bool | Literal["block"] = Field(
        default=True,
        description="on a cluster: all launches one after another on the same machines; `block`: those of a block, and "
        "blocks side by side; false: every launch wherever there is room",
    )
    seed: int = Field(default=0, description="of a random order, and of shuffled levels")
    margin: float = Field(default=0.02, gt=0, lt=1, description="a ratio this near 1 is no difference")
    aa: bool = Field(default=False, description="run the base against itself: the noise floor")
    factors: dict[str, dict[str, list[str]]] = Field(
        default={}, description="a 2x2: factor -> level -> the arms at that level; gives main effects and interaction"
    )
    promise: dict[str, str] = Field(
        default={}, description="adaptive arm -> treatment: the arm must be as good as the better of that and the base"
    )


class Profile(Strict):
    """A trace of what the server does, taken while a level runs; that level's numbers are then no measurement."""

    levels: list[Name] = Field(min_length=1, description="names of levels: c10, r2.5, serial")
    after_s: float = Field(default=5.0, ge=0, le=1e5, description="after the level is at its concurrency")
    seconds: Seconds = Field(default=2.0, description="how long it is traced")


class Refine(Strict):
    """Spend launches where the answer is least certain, in place of a fixed number of them everywhere."""

    width: float = Field(default=1.5, gt=1, description="a crossover's interval: upper end over lower end")
    blocks: Count = Field(default=8, description="launches an arm that may be spent")
    minutes: Seconds | None = Field(default=None, description="time that may be spent")


class DocTarget(Strict):
    """A marked block in a Markdown file that the run keeps up to date."""

    doc: str = Field(description="a path within the project")
    block: str = Field(description="the name in its two marker lines")

    @field_validator("doc")
    @classmethod
    def _inside(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/"):
            raise ValueError("a document lies within the project: no leading `/`, no `..`")
        return value


class Timeouts(Strict):
    """Deadlines; each must be shorter than the one that holds it."""

    request_s: Seconds | None = Field(default=None, description="one request; default: 30 s, and one second a token")
    level_s: Seconds | None = Field(default=None, description="one level; default: what its requests may take")
    start_s: Seconds = Field(default=600.0, description="from start to the first generated token")
    run_s: Seconds | None = Field(default=None, description="the whole run")


class Hardware(Strict):
    """The machine a recipe is meant for, so that rules can speak before it is rented."""

    gpu: str | None = Field(default=None, description="model, such as RTX PRO 6000 Blackwell")
    count: Count | None = Field(default=None, description="how many GPUs one machine has")
    topology: Literal["pcie", "nvlink"] | None = Field(default=None, description="how the GPUs reach each other")
    driver: str | None = Field(default=None, description="NVIDIA driver version, such as 580.95.05")


class Grid(Strict):
    """Values to go through, in a recipe for all arms or in an arm for itself: dotted paths to lists of values."""

    matrix: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = Field(
        default={}, description="dotted path -> values; every combination is an arm"
    )
    zip: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = Field(
        default={}, description="dotted path -> values, taken side by side"
    )
    exclude: list[dict[str, Scalar]] = Field(default=[], description="combinations to leave out")


class Setup(Strict):
    """The part of a recipe an arm may change."""

    env: str | None = None
    model: ModelFile | None = None
    server: ServerSection
    workload: Workload


class Recipe(Grid):
    """A whole recipe, before its arms are worked out."""

    recipe: Name = Field(description="the name of the recipe, and of its runs")
    question: str = Field(description="what the run is to answer; stands in the report and in LOGBOOK.md")
    env: str | None = Field(default=None, description="an environment by name: envspecs/NAME.yaml")
    model: ModelFile | None = Field(default=None, description="the model to serve")
    server: ServerSection = Field(description="the server of every arm, as far as an arm does not say otherwise")
    arms: dict[Name, dict[str, object]] = Field(
        default={"only": {}},
        min_length=1,
        description="name -> what the arm changes of `env`, `model`, `server` and `workload`, and a grid of its own",
    )
    workload: Workload = Field(description="what is asked")
    warmup: Warmup = Field(default=Warmup(), description="requests that are not measured")
    sweep: Sweep = Field(description="the load levels of every launch")
    client: Client = Field(default=Client(), description="where the load comes from")
    compare: Compare | None = Field(default=None, description="which arms are compared, and how often each is launched")
    refine: Refine | None = Field(default=None, description="spend launches where the answer is least certain")
    profile: Profile | None = Field(default=None, description="trace levels while they are measured")
    expect: dict[str, list[str]] = Field(
        default={}, description="arm, or what its grid grew from -> features that must prove to be engaged"
    )
    publish: list[DocTarget | Literal["logbook", "record"]] = Field(
        default=[], description="what a finished run writes: blocks in documents, its logbook entry, its record"
    )
    share_launches: bool = Field(
        default=True, description="arms that differ only in `workload` are measured on one server, one after the other"
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="deadlines, seconds")
    on_failure: Literal["stop", "relaunch-and-continue", "skip-level"] = Field(
        default="stop", description="what becomes of a launch whose server dies"
    )
    allow_drift: str | None = Field(default=None, description="why a drifted environment may run all the same")
    hardware: Hardware = Field(default=Hardware(), description="the machine this is meant for, for rules")
    accept: dict[str, str] = Field(default={}, description="rule id -> why the recipe goes on all the same")
