"""One measured level with all that other tools' files want to know of it, and the figures that their scripts compute.

The definitions here are the peers', not ours, and only their files use them: ours stand in `stats.metrics`.
"""

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from harness.errors import InputError
from harness.load.records import RequestRecord
from harness.recipe.plan import PlannedArm
from harness.run.store import Run
from harness.stats import metrics
from harness.stats.level import LevelResult
from harness.strict import suggest

MILLISECONDS = 1000.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished level of a run: where it stands, what it gave, its measured requests in the order of sending."""

    run_id: str
    launch: str
    arm: PlannedArm
    result: LevelResult
    records: tuple[RequestRecord, ...]
    started: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The level's name, such as `c4`."""
        return str(self.result.level["name"])

    @property
    def good(self) -> list[RequestRecord]:
        """The requests that are samples."""
        return [record for record in self.records if record.ok and record.chunks]

    @property
    def label(self) -> str:
        """Where the numbers come from and what they are worth, in a line."""
        words = [f"harness {self.run_id}/{self.launch}/{self.name}", self.result.verdict.state]
        return ", ".join(words + (["simulated"] if self.result.simulated else []))

    @property
    def duration_s(self) -> float | None:
        """First send to the end of the last stream, over measured requests: what the peers divide by."""
        if not self.good:
            return None
        return max(record.end_s for record in self.records) - min(record.sent_s for record in self.records)

    @property
    def model(self) -> str | None:
        """What the server calls its model."""
        listed = (self.started.get("models") or {}).get("data") or [{}]
        return listed[0].get("id") or (self.arm.model.name if self.arm.model else None)

    @property
    def dialect(self) -> str:
        """In which dialect its requests were asked."""
        return str(self.arm.workload["dialect"])

    @property
    def concurrency(self) -> int | None:
        """The closed loop's width; None where the level has none."""
        if self.result.level.get("mode") == "serial":
            return 1
        value = self.result.level.get("concurrency")
        return int(value) if value is not None else None

    @property
    def rate(self) -> float | None:
        """Requests a second of an open loop."""
        value = self.result.level.get("rate")
        return float(value) if value is not None else None

    def of_each(self, value: Callable[[RequestRecord], T], failed: T) -> list[T]:
        """One entry a request, in the order they were sent; `failed` for those that are no sample."""
        return [value(record) if record.ok and record.chunks else failed for record in self.records]

    @property
    def errors(self) -> list[str]:
        """One entry a request: why it is no sample, empty where it is one."""
        return ["" if one.ok else ": ".join(filter(None, (one.reason, one.detail))) for one in self.records]

    @property
    def date(self) -> datetime.datetime:
        """When the level began, UTC."""
        return datetime.datetime.fromisoformat(self.result.started_at)


def levels(run: Run, wanted: Sequence[str] = ()) -> list[Measured]:
    """The finished levels of a run.

    Args:
        run: a stored run.
        wanted: names of levels (`c4`) or of one launch's level (`02-eagle3/c4`); none: all.

    Raises:
        InputError: there is no finished level, or none of a wanted name; names those there are.
    """
    plan = run.plan()
    found = [
        Measured(
            run_id=run.run_id,
            launch=launch,
            arm=plan.arms[result.arm],
            result=result,
            records=_measured(run, launch, result),
            started=run.launch(launch),
        )
        for launch, result in run.levels()
    ]
    if not found:
        raise InputError(f"run `{run.run_id}` has no finished level")
    known = {name for one in found for name in (one.name, f"{one.launch}/{one.name}")}
    if unknown := [name for name in wanted if name not in known]:
        listed = ", ".join(f"`{name}`" for name in unknown)
        hint = suggest(unknown[0], known) or "its levels: " + ", ".join(f"{one.launch}/{one.name}" for one in found)
        raise InputError(f"run `{run.run_id}` has no finished level {listed}", hint=hint)
    return [one for one in found if not wanted or {one.name, f"{one.launch}/{one.name}"} & set(wanted)]


def _measured(run: Run, launch: str, result: LevelResult) -> tuple[RequestRecord, ...]:
    listed = run.requests(launch, str(result.level["name"]))
    measured = (record for record in listed if record.phase == "measure")
    return tuple(sorted(measured, key=lambda record: record.sent_s))


def distributions(samples: Mapping[str, Iterable[float | None]], percentiles: Iterable[int]) -> dict[str, float]:
    """`mean_NAME_ms`, `median_NAME_ms`, `std_NAME_ms`, `pNN_NAME_ms` of each, as both scripts print them.

    The standard deviation is the population's; percentiles interpolate linearly and are given for any number of
    samples; without a sample everything is 0.
    """
    found: dict[str, float] = {}
    shares = list(percentiles)
    for name, values in samples.items():
        array = np.asarray([value for value in values if value is not None] or [0.0], dtype=float) * MILLISECONDS
        found |= {
            f"mean_{name}_ms": float(array.mean()),
            f"median_{name}_ms": float(np.median(array)),
            f"std_{name}_ms": float(array.std()),
            **{f"p{share}_{name}_ms": float(np.percentile(array, share)) for share in shares},
        }
    return found


def peaks(records: Sequence[RequestRecord], gaps: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Most events in a second, and most requests that touched a second, of whole seconds from the first send.

    Both scripts print them as peak output tokens a second and peak concurrent requests. A request that ends in the
    second in which another begins counts beside it, so that the latter may be twice the concurrency.
    """
    if not records:
        return 0.0, 0
    first = min(record.sent_s for record in records)
    ends = [record.sent_s + (metrics.e2e(record) or 0.0) - first for record in records]
    seconds = math.ceil(max(ends)) + 1
    events, touched = np.zeros(seconds), np.zeros(seconds)
    for record, end, waits in zip(records, ends, gaps, strict=True):
        begin = record.sent_s - first
        times = begin + (metrics.ttft(record) or 0.0) + np.cumsum([0.0, *waits])
        np.add.at(events, times.astype(int).clip(max=seconds - 1), 1)
        touched[int(begin) : int(end) + 1] += 1
    return float(events.max()), int(touched.max())


def total(values: Iterable[int | None]) -> int | None:
    """The sum; None where one is not known."""
    listed = list(values)
    return sum(value for value in listed if value is not None) if None not in listed else None


def per_second(amount: float | None, seconds: float | None) -> float | None:
    """A rate; None where either is not known."""
    return amount / seconds if amount is not None and seconds else None
