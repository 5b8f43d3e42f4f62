"""What `comparison.json` holds: rows with verdicts, and everything that was found beside them.

The types stand apart from the functions that make them, because the parts (crossover, policy, fairness ...) are made in
their own rooms and meet here.
"""

from typing import Any, Literal

from harness.stats.consistency import SerialCheck
from harness.stats.crossover import Crossover
from harness.stats.equivalence import Equivalence
from harness.stats.fairness import Fairness
from harness.stats.intervals import Interval
from harness.stats.level import Reason, Stored
from harness.stats.saturation import Saturation
from harness.stats.speculation import Explained

FORMAT = "harness.comparison/1"
POLICY_FORMAT = "harness.policy/1"

RowVerdict = Literal["better", "worse", "equivalent", "unresolved", "not comparable"]


class NoiseFloor(Stored):
    """How far identical arms differ on a machine: what an A/A run gives.

    `spread` is the standard deviation of the log ratio of one launch pair, `freedom` its degrees of freedom, `largest`
    the largest ratio seen between two identical launches less 1.
    """

    spread: float
    freedom: float
    largest: float
    source: str


class Estimate(Stored):
    """Treatment over base for one metric at one level.

    `base` and `treatment` are geometric means over launches, in the metric's unit; `interval` is that of the ratio,
    None where one launch an arm allows none. `within` is how far the ratio moves within one launch an arm, from time
    slices: what another launch does is not in it.
    """

    base: float
    treatment: float
    ratio: float
    log_ratio: float
    interval: Interval | None = None
    within: Interval | None = None
    launches: int


class Row(Stored):
    """The comparison of one level.

    `direction` is which arm the point estimate favours, whether or not that is more than noise; `verdict` is about the
    treatment. `p` is adjusted for the whole table. `more_launches` is how many more an arm would probably settle it.
    `suspect` names the arms whose level has a suspect launch.
    """

    key: str
    level: dict[str, Any]
    concurrency: int | None
    verdict: RowVerdict
    direction: Literal["base", "treatment", "even"] | None = None
    estimate: Estimate | None = None
    secondary: dict[str, Estimate] = {}
    p: float | None = None
    more_launches: int | None = None
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    acceptance: dict[str, float] = {}
    speculation: Explained | None = None
    suspect: tuple[str, ...] = ()


class Policy(Stored):
    """A decision that a machine can read.

    Attributes:
        decision: `go` (on everywhere that was measured), `go in range`, `no-go`, or `undecided`.
        on: concurrencies, first and last, where the treatment should be on; within the measured range.
        sentence: the decision and its reasons.
        levers: the engines' own form of it, by flag; empty where there is none.
    """

    format: str = POLICY_FORMAT
    treatment: str
    decision: Literal["go", "go in range", "no-go", "undecided"]
    on: tuple[tuple[int, int], ...]
    sentence: str
    levers: dict[str, Any] = {}
    simulated: bool = False


class Comparison(Stored):
    """Everything `comparison.json` says about one treatment against its base.

    `summary` is the answer in a sentence; `suspect` says why one might distrust it all the same.
    """

    format: str = FORMAT
    base: str
    treatment: str
    metric: str
    margin: float
    confidence: float
    rows: tuple[Row, ...]
    crossover: Crossover
    summary: str
    notes: tuple[str, ...] = ()
    simulated: bool = False
    published: dict[str, str] = {}
    noise: NoiseFloor | None = None
    fairness: Fairness
    suspect: tuple[Reason, ...] = ()
    saturation: Saturation | None = None
    equivalence: Equivalence | None = None
    serial: tuple[SerialCheck, ...] = ()
    policy: Policy | None = None
