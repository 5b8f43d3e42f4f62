"""Whether two arms gave the same answers to the same prompts.

Speculation claims to be lossless, so under greedy decoding the treatment should say what the base says. Batches of
other sizes round differently, so even one arm need not repeat itself: its own repeat is the yardstick.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from harness.load.records import RequestRecord
from harness.stats.arms import Arm
from harness.stats.level import Reason, Stored

FLOOR = 0.9  # token agreement below which a comparison of speeds is suspect
ALLOWANCE = 0.05  # how much less than its own repeat an arm may agree with the other


@dataclass(frozen=True, slots=True)
class Output:
    """One answer: its tokens (ids, or characters where there are none), how it ended, and how long it was."""

    tokens: Sequence[Hashable]
    finish_reason: str | None = None
    length: int | None = None


class Agreement(Stored):
    """Answers of one side against those of another.

    Attributes:
        prompts: prompts that both answered.
        identical: of these, answered alike to the last token.
        token_share: agreeing tokens before the first divergence, over the tokens of the longer answer, all prompts.
        divergence: quantiles (0, 25, 50, 75, 100 %) of where the answers part, in tokens; None where none do.
        unit: what a token is here.
    """

    prompts: int
    identical: int
    token_share: float
    divergence: tuple[float, ...] | None
    unit: str


class Equivalence(Stored):
    """The treatment's answers against the base's, beside the base's against its own repeat."""

    between: Agreement
    repeat: Agreement | None
    finish_reasons: dict[str, dict[str, int]]
    mean_lengths: dict[str, float | None]
    suspect: tuple[Reason, ...]
    sentence: str


def agreement(one: Mapping[str, Output], other: Mapping[str, Output], unit: str) -> Agreement | None:
    """Compare two sets of answers by prompt; None where they share no prompt."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    parts = [_common(one[prompt].tokens, other[prompt].tokens) for prompt in shared]
    longest = [max(len(one[prompt].tokens), len(other[prompt].tokens)) for prompt in shared]
    diverging = [part for part, length in zip(parts, longest, strict=True) if part < length]
    total = sum(longest)
    return Agreement(
        prompts=len(shared),
        identical=len(shared) - len(diverging),
        token_share=sum(parts) / total if total else 1.0,
        divergence=tuple(float(q) for q in np.quantile(diverging, [0, 0.25, 0.5, 0.75, 1])) if diverging else None,
        unit=unit,
    )


def compare_outputs(base: Arm, treatment: Arm, floor: float = FLOOR) -> Equivalence | None:
    """Compare what two arms answered, as far as their records hold it.

    Answers are paired within a level and a prompt, so that a batch of another size is not taken for another model. The
    base's repeat is its first launch against its others, where these were given the same prompts.

    Args:
        base: the base arm.
        treatment: the treatment arm.
        floor: token share below which the comparison is suspect, unless the base repeats itself no better.

    Returns:
        None where the arms share no answered prompt.
    """
    unit = _unit([base, treatment])
    ours, theirs = ([_answers(launch.records, unit) for launch in arm.launches] for arm in (base, treatment))
    between = agreement(_merged(ours), _merged(theirs), unit)
    if between is None:
        return None
    repeat = agreement(ours[0], _merged(ours[1:]), unit) if len(ours) > 1 else None
    suspect = _suspicion(between, repeat, floor)
    sides = {base.name: _merged(ours), treatment.name: _merged(theirs)}
    return Equivalence(
        between=between,
        repeat=repeat,
        finish_reasons={name: _endings(answers.values()) for name, answers in sides.items()},
        mean_lengths={name: _mean_length(answers.values()) for name, answers in sides.items()},
        suspect=suspect,
        sentence=_sentence(between, repeat),
    )


def _suspicion(between: Agreement, repeat: Agreement | None, floor: float) -> tuple[Reason, ...]:
    wanted = floor if repeat is None else min(floor, repeat.token_share - ALLOWANCE)
    if between.token_share >= wanted:
        return ()
    message = (
        f"the arms agree on {between.token_share:.1%} of the {between.unit} before they part, at least {wanted:.1%} "
        "was expected: the speeds belong to different outputs"
    )
    return (Reason(code="outputs-differ", message=message),)


def _sentence(between: Agreement, repeat: Agreement | None) -> str:
    text = (
        f"{between.identical} of {between.prompts} answers are identical, {between.token_share:.1%} of the "
        f"{between.unit} agree before the answers part"
    )
    if between.divergence:
        text += f" (first divergence: median {between.divergence[2]:.0f}, earliest {between.divergence[0]:.0f})"
    if repeat is not None:
        text += f"; the base repeats itself in {repeat.identical} of {repeat.prompts}, {repeat.token_share:.1%}"
    return text


def _answers(records: Mapping[str, Sequence[RequestRecord]], unit: str) -> dict[str, Output]:
    """Good answers by level and prompt."""
    return {
        f"{level}/{record.prompt_id}": Output(_tokens(record, unit), record.finish_reason, record.output_tokens)
        for level, requests in records.items()
        for record in requests
        if record.ok and record.phase == "measure" and (record.text is not None or "token_ids" in record.extra)
    }


def _unit(arms: Iterable[Arm]) -> str:
    """Token ids where every answer has them, else characters."""
    records = [
        record
        for arm in arms
        for launch in arm.launches
        for requests in launch.records.values()
        for record in requests
        if record.ok
    ]
    return "token ids" if records and all("token_ids" in record.extra for record in records) else "characters"


def _tokens(record: RequestRecord, unit: str) -> Sequence[Hashable]:
    return tuple(record.extra["token_ids"]) if unit == "token ids" else (record.text or "")


def _merged(answers: Iterable[Mapping[str, Output]]) -> dict[str, Output]:
    """The first answer to each prompt."""
    merged: dict[str, Output] = {}
    for launch in answers:
        for prompt, output in launch.items():
            merged.setdefault(prompt, output)
    return merged


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Length of the common beginning."""
    missing = object()
    for position, (left, right) in enumerate(zip_longest(one, other, fillvalue=missing)):
        if left != right:
            return position
    return len(one)


def _endings(answers: Iterable[Output]) -> dict[str, int]:
    return dict(sorted(Counter(answer.finish_reason or "not known" for answer in answers).items()))


def _mean_length(answers: Iterable[Output]) -> float | None:
    lengths = [answer.length for answer in answers if answer.length is not None]
    return sum(lengths) / len(lengths) if lengths else None
