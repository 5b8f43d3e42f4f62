"""Published tables as arms: numbers of others, which can be compared but say that they were not measured here.

A reference holds one arm of one published run. Its throughputs are whole-run figures (tokens over wall clock), because
that is what scripts print; it has no raw data, so no interval can be made from it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from harness.errors import InputError
from harness.stats.arms import PRIMARY, Arm, Cell, Launch, level_key
from harness.stats.compare import Comparison, Settings, compare
from harness.stats.consistency import SerialCheck, serial_against_closed
from harness.strict import Strict, parse, read

_DISTRIBUTIONS = ("ttft_s", "tpot_s", "tpot_naive_s", "chunk_gap_s", "token_itl_s", "e2e_s")
LATENCIES = {name.removesuffix("s") + "p50_s": name for name in _DISTRIBUTIONS}


Figure = Annotated[float | None, Field(gt=0, description="seconds; the metric of that name")]


class PublishedLevel(Strict):
    """One row of a published table; exactly one of `concurrency`, `rate`, `serial` and `saturation` says which.

    Latencies stand under the names of our own formulas (docs/metrics.md): what a tool calls TPOT or ITL goes where its
    formula belongs.
    """

    concurrency: int | None = Field(default=None, ge=1, description="requests in flight, closed loop")
    rate: float | None = Field(default=None, gt=0, description="requests a second, open loop")
    serial: bool = Field(default=False, description="one request after another, each on its own connection")
    saturation: bool = Field(default=False, description="as much as it takes, without a level")
    output_tok_s: float = Field(gt=0, description="output tokens a second over the whole run")
    per_request_tok_s: float | None = Field(default=None, gt=0, description="mean over requests of tokens / E2E")
    ttft_mean_s: Figure = None
    ttft_p50_s: Figure = None
    ttft_p99_s: Figure = None
    tpot_mean_s: Figure = None
    tpot_p50_s: Figure = None
    tpot_p99_s: Figure = None
    tpot_naive_mean_s: Figure = None
    tpot_naive_p50_s: Figure = None
    tpot_naive_p99_s: Figure = None
    chunk_gap_mean_s: Figure = None
    chunk_gap_p50_s: Figure = None
    chunk_gap_p99_s: Figure = None
    token_itl_mean_s: Figure = None
    token_itl_p50_s: Figure = None
    token_itl_p99_s: Figure = None
    e2e_mean_s: Figure = None
    e2e_p50_s: Figure = None
    e2e_p99_s: Figure = None
    acceptance_length: float | None = Field(default=None, ge=1, description="tokens a step and request")
    requests: int | None = Field(default=None, ge=1, description="how many were asked")
    ok: int | None = Field(default=None, ge=0, description="how many of them ended well")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum((self.concurrency is not None, self.rate is not None, self.serial, self.saturation)) != 1:
            raise ValueError("a level is exactly one of `concurrency`, `rate`, `serial: true` and `saturation: true`")
        return self

    @property
    def level(self) -> dict[str, Any]:
        """As a planned level is written."""
        if self.concurrency is not None:
            return {"mode": "closed", "concurrency": self.concurrency}
        if self.rate is not None:
            return {"mode": "open", "rate": self.rate}
        return {"mode": "serial" if self.serial else "saturation"}


class Reference(Strict):
    """One arm of one published run.

    `server` names the deployment: references of one server are the same server by other methods. `differences` says in
    which ways its figures mean something else than ours of the same name.
    """

    reference: str = Field(description="its name, which is its file's")
    arm: str = Field(description="the arm's name in a comparison")
    server: str = Field(description="the deployment")
    source: str = Field(description="where the numbers were published")
    hardware: str
    model: str
    method: str = Field(description="how it was measured, and by what")
    prompts: str | None = None
    flags: str | None = None
    differences: list[str] = Field(default=[], description="where its figures mean something else than ours")
    levels: list[PublishedLevel] = Field(min_length=1, description="the rows of its table")

    def as_arm(self, name: str | None = None) -> Arm:
        """The reference as an arm of one launch, marked as published; by its arm's name unless another is given."""
        cells = tuple(_cell(level) for level in self.levels)
        launch = Launch(launch=self.reference, block=0, cells=cells)
        return Arm(name=name or self.arm, launches=(launch,), published=f"{self.reference}: {self.source}")


def load(path: Path) -> Reference:
    """Read one reference.

    Raises:
        InputError: the file is wrong; every fault with its line.
    """
    return parse(read(path), Reference)


def load_all(folder: Path) -> list[Reference]:
    """Every reference of a folder, by name."""
    return [load(path) for path in sorted(folder.glob("*.yaml"))]


def is_reference(path: Path) -> bool:
    """Whether a path is a reference file, rather than a run folder or a recipe."""
    if path.suffix not in {".yaml", ".yml"} or not path.is_file():
        return False
    try:
        return "reference" in read(path).data
    except InputError:
        return False


class Published(NamedTuple):
    """References against the first of them, and what the folder says about their servers by other methods."""

    comparisons: tuple[Comparison, ...]
    serial: tuple[SerialCheck, ...]


def compare_published(paths: Sequence[Path], settings: Settings | None = None) -> Published:
    """Compare references: the first is the base.

    The serial figures of the same servers, wherever the references' folders hold them, are set against the closed loops
    at C=1, so that a table never hides that another method said something else.

    Args:
        paths: two reference files or more.
        settings: of the comparison.

    Raises:
        InputError: a file is wrong, or there is only one.
    """
    base, *others = [load(path) for path in paths]
    if not others:
        raise InputError(f"`{paths[0]}` is one published arm: nothing to compare", hint="name a second reference")
    servers = {base.server, *(other.server for other in others)}
    siblings = [found for folder in sorted({path.parent for path in paths}) for found in load_all(folder)]
    return Published(
        comparisons=tuple(compare(*_named(base, other), settings) for other in others),
        serial=tuple(disagreements([found for found in siblings if found.server in servers])),
    )


def _named(base: Reference, other: Reference) -> tuple[Arm, Arm]:
    """Both as arms; by their references' names where the arms' names would not tell them apart."""
    if base.arm == other.arm:
        return base.as_arm(base.reference), other.as_arm(other.reference)
    return base.as_arm(), other.as_arm()


def disagreements(references: Sequence[Reference], margin: float = 0.02) -> list[SerialCheck]:
    """Serial figures against closed loops at C=1 of the same server, wherever a pair of references has both.

    Args:
        references: any; those of one `server` are set against each other.
        margin: how far apart the two may be.

    Returns:
        One check a pair, agreeing ones included: that the others agree is part of the finding.
    """
    return [
        check
        for serial in references
        for closed in references
        if serial.server == closed.server and (check := _check(serial, closed, margin)) is not None
    ]


def _check(serial: Reference, closed: Reference, margin: float) -> SerialCheck | None:
    one = _only(serial.levels, "serial")
    other = _only(closed.levels, "c1")
    name = f"{serial.arm} ({serial.reference} against {closed.reference})"
    return serial_against_closed(Arm(name, (Launch("published", 0, (*one, *other)),)), margin)


def _only(levels: Iterable[PublishedLevel], key: str) -> tuple[Cell, ...]:
    return tuple(_cell(level) for level in levels if level_key(level.level) == key)


def _cell(level: PublishedLevel) -> Cell:
    given = level.model_dump(exclude_none=True)
    values = {PRIMARY: level.output_tok_s, "output_tok_s_whole": level.output_tok_s}
    values |= {name: given[field] for field, name in LATENCIES.items() if field in given}
    if level.per_request_tok_s is not None:
        values["per_request_tok_s"] = level.per_request_tok_s
    failed = (level.requests or 0) - level.ok if level.ok is not None else 0
    reasons = (f"{failed} of {level.requests} requests failed",) if failed > 0 else ()
    return Cell(
        key=level_key(level.level),
        level=level.level,
        values=values,
        state="suspect" if reasons else "valid",
        reasons=reasons,
        requests=level.requests,
    )
