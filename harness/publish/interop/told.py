"""From other tools' results to references: what each file says in our names, and where it means something else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MILLISECONDS = 1000.0
# Which of a distribution's figures a reference holds, and what the vLLM and SGLang scripts call them.
_FIGURES = {"mean": "mean", "p50": "median", "p99": "p99"}


@dataclass(frozen=True, slots=True)
class Told:
    """One level as another tool's file tells it.

    `level` has the fields of `recipe.references.PublishedLevel`; `differences` says in which ways its figures mean
    something else than ours of the same name.
    """

    level: dict[str, Any]
    tool: str
    differences: tuple[str, ...]
    model: str | None = None
    date: str | None = None
    label: str | None = None


def positive(value: Any) -> float | None:
    """A number above 0; None for anything else: tools write 0 where they have no sample."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value > 0 else None


def text(value: Any) -> str | None:
    """A string that says something; None for anything else."""
    return value if isinstance(value, str) and value else None


def milliseconds(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float | None]:
    """`mean_ttft_ms`, `median_ttft_ms`, `p99_ttft_ms` and the like as a reference's `ttft_mean_s`, `ttft_p50_s` ...

    Args:
        data: a result of vLLM's or SGLang's script.
        names: its name of a distribution -> ours without the unit.
    """
    return {
        f"{ours}_{figure}_s": _scaled(data.get(f"{word}_{theirs}_ms"), 1 / MILLISECONDS)
        for theirs, ours in names.items()
        for figure, word in _FIGURES.items()
    }


def seconds(name: str, figures: Mapping[str, Any], factor: float = 1.0) -> dict[str, float | None]:
    """A distribution's `mean`, `p50`, `p99` as `NAME_mean_s`, `NAME_p50_s`, `NAME_p99_s`; `factor` makes seconds."""
    return {f"{name}_{figure}_s": _scaled(figures.get(figure), factor) for figure in _FIGURES}


def _scaled(value: Any, factor: float) -> float | None:
    known = positive(value)
    return None if known is None else known * factor


def offered(data: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's and SGLang's scripts say a level is: a closed loop, else an open one, else everything at once."""
    if data.get("max_concurrency"):
        return {"concurrency": data["max_concurrency"]}
    rate = positive(data.get("request_rate"))
    return {"saturation": True} if rate is None else {"rate": rate}


def reference(told: Sequence[Told], given: Mapping[str, str | None]) -> dict[str, Any]:
    """One arm of levels as the content of a reference file.

    Args:
        told: its levels, of one tool.
        given: `reference`, `arm`, `source`; and where the caller knows them `server`, `hardware`, `model`.
    """
    says = dict.fromkeys(
        [*(one.tool for one in told), *(one.label for one in told), *(one.date and f"of {one.date}" for one in told)]
    )
    return {
        "reference": given["reference"],
        "arm": given["arm"],
        "server": given.get("server") or given["arm"],
        "source": given["source"],
        "hardware": given.get("hardware") or "not told",
        "model": given.get("model") or ", ".join(sorted({one.model for one in told if one.model})) or "not told",
        "method": "; ".join(filter(None, says)),
        "differences": list(dict.fromkeys(line for one in told for line in one.differences)),
        "levels": [{key: value for key, value in one.level.items() if value is not None} for one in told],
    }
