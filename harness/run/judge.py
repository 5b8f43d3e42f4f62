"""The verdict on one level, from its requests and from what was seen around it.

`sweep` judges a level when its clock has stopped, `verify` once more from what was stored: both in this one way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.engines.engine import Engine, Observed
from harness.load.records import RequestRecord
from harness.recipe.plan import PlannedArm
from harness.run import gpu
from harness.stats import slices, validity
from harness.stats.level import LevelResult, Reason, Verdict

# Facts of a level's `server` that were noted at the time and follow from nothing else that is stored.
NOTED = ("profile", "log", "shared_with", "template_tokens", "unread")
CUT = frozenset({"level-timeout"})  # reasons of levels that were broken off
_LOG = "the server's log"
_SLACK = 0.05  # a rate that may be further off than this by its two ends alone is no witness
_NOT_FLUSHED = Reason(code="not-flushed", message="the server did not confirm that it emptied its prefix cache")


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen around one level, beside its requests.

    Attributes:
        answers: what the server said of itself when it was ready, by path.
        log: the server's log until then.
        deltas: how far its counters went over the level, by its own names.
        evidence: False where nobody can tell any more what the server logged: promised features are not judged.
        died: how the server ended, where it did.
        restarted: a counter went backwards.
        throttles: masks of the GPU's reasons for slowing down.
        drift: in what the environment was not what its lock says, where the recipe allowed that.
        flushed: whether the server confirmed an empty prefix cache; None where it was not asked.
        cut: why the level was broken off.
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""
    deltas: Mapping[str, float] = field(default_factory=dict)
    evidence: bool = True
    died: str | None = None
    restarted: bool = False
    throttles: Sequence[int] = ()
    drift: Sequence[str] = ()
    flushed: bool | None = None
    cut: Sequence[Reason] = ()


def judged(
    result: LevelResult, arm: PlannedArm, engine: Engine, records: Sequence[RequestRecord], seen: Seen
) -> LevelResult:
    """A level's result with its verdict put in.

    Args:
        result: what `stats.metrics` made of the requests; the verdict it carries is ignored.
        arm: what was planned for its server.
        engine: who knows what proves a feature.
        records: the level's requests.
        seen: everything else.
    """
    observed = Observed(seen.answers, seen.log, seen.deltas)
    # Where nothing was answered, nothing had a chance to engage.
    promised = arm.expect if result.ok and seen.evidence else ()
    logged = result.server.get("log") or {}
    context = validity.Context(
        cold=bool(arm.workload["cold"]),
        fixed_tokens=arm.workload["max_tokens"] if arm.workload["ignore_eos"] else None,
        server_died=seen.died,
        server_restarted=seen.restarted,
        throttled=[gpu.throttle_names(mask) for mask in seen.throttles],
        evidence=[engine.evidence(feature, observed) for feature in promised],
        shared_with=result.server.get("shared_with") or (),
        slices=slices.throughput(result, records),
        counts=_counted(logged, records),
        rates=_rated(logged),
        template_tokens=int(result.server.get("template_tokens") or 0),
        records=records,
    )
    flushed = [_NOT_FLUSHED] if seen.flushed is False else []
    return _with_reasons(
        validity.judged(result, context), [*_drifted(seen.drift), *flushed, *_profiled(result), *seen.cut]
    )


def _counted(logged: Mapping[str, Any], records: Sequence[RequestRecord]) -> dict[str, float]:
    """The log's count of tokens, where it has a line for every request."""
    return {_LOG: logged["tokens"]} if logged.get("requests") == len(records) else {}


def _rated(logged: Mapping[str, Any]) -> dict[str, validity.Rate]:
    """The log's rate beside the client's over the same time; one too short to tell anything is left out."""
    if "output_tok_s" not in logged or logged["slack"] > _SLACK:
        return {}
    return {_LOG: validity.Rate(logged["output_tok_s"], logged["client_tok_s"], logged["slack"])}


def _profiled(result: LevelResult) -> list[Reason]:
    """A level that was traced while it ran, or should have been."""
    traced = result.server.get("profile")
    if not traced:
        return []
    if trouble := traced.get("trouble"):
        return [Reason(code="profile", message=f"no trace: {trouble}")]
    message = f"the server was traced for {traced['seconds']:g} s of it, which slows it down"
    return [Reason(code="profile", message=message)]


def _drifted(drift: Sequence[str]) -> list[Reason]:
    if not drift:
        return []
    more = f" and {len(drift) - 1} more" if len(drift) > 1 else ""
    return [Reason(code="drifted", message=f"the environment is not what its lock says: {drift[0]}{more}")]


def _with_reasons(result: LevelResult, reasons: Sequence[Reason]) -> LevelResult:
    """A judged level with more to distrust it for; one that was cut short is invalid, another valid one suspect."""
    if not reasons:
        return result
    cut = any(reason.code in CUT for reason in reasons)
    state = "invalid" if cut else "suspect" if result.verdict.state == "valid" else result.verdict.state
    return result.model_copy(update={"verdict": Verdict(state=state, reasons=(*result.verdict.reasons, *reasons))})
