"""What speculation did at a level: tokens a step, the time of a step, and the speed that follows from the two.

Acceptance length is the mean number of tokens that one verification step of the target model yields, the bonus token
included: 1 without speculation. Decoding speed is acceptance length over step time, so a speed-up is the ratio of
acceptance lengths over the ratio of step times: speculation wins while its steps grow by less than it accepts.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from harness.load.records import RequestRecord
from harness.stats.level import LevelResult, Reason, Stored

VERIFY_COUNTS = ("spec_verify_ct", "verify_count", "verify_steps")  # per request, in the engines' own words
APART = 0.05  # two ways to the same acceptance length


class Acceptance(Stored):
    """Acceptance lengths of one level.

    Attributes:
        level: by the server's counters over the level; by requests, then by its log, where there are none.
        by_request: token-weighted over requests, where they say how often they were verified.
        by_chunk: (n - k_1) / (chunks - 1) over requests whose stream sends one chunk a step.
        drafted: tokens drafted.
        accepted: of these, accepted.
        findings: where two ways to the same number disagree.
    """

    level: float | None
    by_request: float | None = None
    by_chunk: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    findings: tuple[Reason, ...] = ()

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None


class Explained(Stored):
    """A speed-up in its two factors, all as treatment over base.

    `speed` is the ratio of decoding speeds (inverse TPOT): `tokens_per_step` / `step_time`. Step times in seconds.
    """

    tokens_per_step: float
    step_time: float
    speed: float
    base_step_s: float
    treatment_step_s: float
    sentence: str


def acceptance(result: LevelResult, records: Sequence[RequestRecord] = ()) -> Acceptance:
    """The acceptance length of a level, by every way the engine leaves open.

    By counters it is 1 + accepted / drafts (vLLM's definition; llama.cpp counts the same three things), or, where
    accepted tokens are not counted, generated tokens over verification steps (SGLang's); by requests, the sum of output
    tokens over the sum of verification steps; by the log, the mean of what its lines say (SGLang before 0.5.23 has
    nothing else for the whole level). All belong to the level alone: nothing here reads an average that the server has
    kept since its start.

    The first token of a request comes from its prefill and not from a step, so short answers make the second and the
    third larger.

    Args:
        result: the level, with `server` deltas `drafts`, `draft_tokens`, `accepted_tokens`, `generated_tokens`, and
            what its `log` says.
        records: its requests, with verification counts in `extra` where the engine gives them.
    """
    good = [record for record in records if record.ok and record.phase == "measure"]
    by_request, by_chunk = _by_request(good), _by_chunk(good)
    by_counter, by_log = _by_counter(result.server), _number(result.server.get("log") or {}, "acceptance_length")
    ways = {"counters": by_counter, "requests": by_request, "chunks": by_chunk}
    level = next((known for known in (by_counter, by_request, by_log) if known is not None), None)
    return Acceptance(
        level=level,
        by_request=by_request,
        by_chunk=by_chunk,
        drafted=_number(result.server, "draft_tokens"),
        accepted=_number(result.server, "accepted_tokens"),
        findings=_findings(ways, _slack(good)) if level is not None else (),
    )


def explain(
    base_tpot_s: float, treatment_tpot_s: float, base_length: float | None, treatment_length: float | None
) -> Explained | None:
    """Split a ratio of decoding speeds into tokens a step and time a step.

    Args:
        base_tpot_s: median TPOT of the base, seconds.
        treatment_tpot_s: of the treatment.
        base_length: its acceptance length; None is no speculation, 1.
        treatment_length: likewise.

    Returns:
        None where neither arm speculates or a TPOT is not positive.
    """
    one, other = base_length or 1.0, treatment_length or 1.0
    if one == other == 1.0 or base_tpot_s <= 0 or treatment_tpot_s <= 0:
        return None
    base_step, treatment_step = base_tpot_s * one, treatment_tpot_s * other
    tokens, time = other / one, treatment_step / base_step
    sentence = (
        f"{other:.2f} against {one:.2f} tokens a step, {treatment_step * 1e3:.1f} against {base_step * 1e3:.1f} ms "
        f"a step: {tokens:.2f} / {time:.2f} = {tokens / time:.2f} times the decoding speed"
    )
    return Explained(
        tokens_per_step=tokens,
        step_time=time,
        speed=tokens / time,
        base_step_s=base_step,
        treatment_step_s=treatment_step,
        sentence=sentence,
    )


def _by_counter(server: Mapping[str, object]) -> float | None:
    drafts, accepted, generated = (_number(server, name) for name in ("drafts", "accepted_tokens", "generated_tokens"))
    if not drafts:
        return None
    if accepted is not None:
        return 1 + accepted / drafts
    return generated / drafts if generated else None


def _by_request(records: Sequence[RequestRecord]) -> float | None:
    tokens, steps = 0, 0.0
    for record in records:
        count = next((record.extra[name] for name in VERIFY_COUNTS if record.extra.get(name)), None)
        if count and record.output_tokens:
            tokens, steps = tokens + record.output_tokens, steps + float(count)
    return tokens / steps if steps else None


def _by_chunk(records: Sequence[RequestRecord]) -> float | None:
    """Tokens a chunk after the first, where every chunk says how many it carries and no read merged two."""
    tokens = chunks = 0
    for record in records:
        counts = [chunk.tokens for chunk in record.chunks]
        if len(counts) < 2 or any(count is None for count in counts) or any(chunk.merged for chunk in record.chunks):
            continue
        tokens += sum(count for count in counts[1:] if count)
        chunks += len(counts) - 1
    return tokens / chunks if chunks else None


def _slack(records: Sequence[RequestRecord]) -> float:
    """How far two ways may be apart: 5 %, and one token a request for the prefill's."""
    tokens = sum(record.output_tokens or 0 for record in records)
    return APART + (len(records) / tokens if tokens else 0.0)


def _findings(ways: Mapping[str, float | None], slack: float) -> tuple[Reason, ...]:
    """Where two known ways disagree.

    Fewer tokens a chunk than a step only say that the engine spreads a step over chunks, as llama.cpp does; more of
    them are more than a step can have yielded.
    """
    known = {name: value for name, value in ways.items() if value is not None}
    if known.get("chunks", 0.0) < min((value for name, value in known.items() if name != "chunks"), default=0.0):
        known.pop("chunks", None)
    return tuple(
        Reason(
            code="acceptance-disagrees",
            message=f"acceptance length is {known[one]:.3f} by {one} and {known[other]:.3f} by {other}",
        )
        for one, other in combinations(sorted(known), 2)
        if abs(math.log(known[one] / known[other])) > math.log1p(slack)
    )


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
