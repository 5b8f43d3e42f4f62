"""What stands in a document's marked blocks: parts of a result as Markdown, with the run and cells they came from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.files import sha256_file
from harness.publish import docs
from harness.publish.tables import beyond_notes, comparison_markdown, levels_markdown, markdown_table
from harness.recipe.plan import Plan, PlannedLaunch
from harness.run import answer as answering
from harness.run.answer import Answer
from harness.run.facts import comparable
from harness.run.store import Run
from harness.run.verify import has_requests
from harness.stats.level import LevelResult

_NONE = "none"


@dataclass(frozen=True, slots=True)
class Result:
    """A stored run as documents show it: with its requests, or as a record without them."""

    run: Run
    plan: Plan
    answer: Answer | None

    @classmethod
    def of(cls, run: Run) -> "Result":
        """A run's result: its answer from its requests where they are here, else the answer that it stored."""
        known = answering.stored(run)
        if has_requests(run):
            known = answering.answer(run) if known is None else answering.derived(run, known)
        return cls(run, run.plan(), known)

    def levels(self, launch: PlannedLaunch) -> list[LevelResult]:
        """The finished levels of one launch."""
        return [result for name, result in self.run.levels() if name == launch.name]

    @property
    def origin(self) -> str:
        """The comment by which a reader, and `publish --check`, find the run."""
        # As the run noted it: a later harness may know more about a plan, and would give it another digest.
        digest = str(self.run.state().get("plan") or self.plan.digest)
        return f"<!-- run {self.run.run_id}; plan {digest[:16]} -->"

    @property
    def environments(self) -> str:
        """Every environment of the run with the head of its `env_id`."""
        named = sorted({f"{arm.env} `{str(arm.env_id)[:16]}`" for arm in self.plan.arms.values() if arm.env})
        return ", ".join(named) or _NONE


def content(result: Result, part: str, *, figure: Path | None = None, beside: Path | None = None) -> str:
    """One part of a result as it stands in a block.

    Args:
        result: the run's.
        part: one of `docs.PARTS`.
        figure: the file of part `figure`, as it is on disk.
        beside: the folder of the document, from which the figure is linked.

    Raises:
        InputError: a part that this run does not have.
    """
    if part == "figure":
        return _figure(result, figure, beside)
    return _PARTS[part](result)


def _whole(result: Result) -> str:
    """Answers, then each arm's levels."""
    parts = [result.origin]
    if result.answer:
        parts += [comparison_markdown(comparison) for comparison in result.answer.comparisons]
        beyond = beyond_notes(result.answer.factorial, [promise.sentence for promise in result.answer.promises])
        parts += ["\n".join(f"- {line}" for line in beyond)] if beyond else []
    parts += _levels_of(result)
    parts.append(f"Run `{result.run.run_id}`, environment {result.environments}.")
    return "\n\n".join(parts)


def _comparison(result: Result) -> str:
    answered = _answered(result)
    return "\n\n".join([_traced(result), *(comparison_markdown(found) for found in answered.comparisons)])


def _verdict(result: Result) -> str:
    """A sentence a treatment."""
    lines = [
        f"**{found.treatment} against {found.base}**{' (simulated)' if found.simulated else ''}: {found.summary}."
        for found in _answered(result).comparisons
    ]
    return "\n\n".join([_traced(result), *lines])


def _levels(result: Result) -> str:
    return "\n\n".join([result.origin, *_levels_of(result)])


def _environment(result: Result) -> str:
    """What ran, and on what."""
    facts = result.run.facts().get("before") or {}
    arms = [
        (arm.name, arm.engine, arm.env or _NONE, f"`{str(arm.env_id)[:16]}`" if arm.env_id else "-",
         arm.model.name if arm.model else "-")
        for arm in result.plan.arms.values()
    ]  # fmt: skip
    git = facts.get("git") or {}
    machine = {
        **comparable(facts),
        "distribution": (facts.get("system") or {}).get("distribution"),
        "commit": f"{str(git.get('commit'))[:12]}{' and changes' if git.get('dirty') else ''}" if git else None,
    }
    rows = [(name, str(value)) for name, value in machine.items() if value is not None]
    tables = [
        markdown_table(("arm", "engine", "environment", "env_id", "model"), arms),
        markdown_table(("machine", ""), rows),
    ]
    return "\n\n".join([result.origin, *("\n".join(table) for table in tables)])


def _figure(result: Result, figure: Path | None, beside: Path | None) -> str:
    """A link to a figure, and what its bytes are."""
    if figure is None or beside is None:
        raise InputError(f"run `{result.run.run_id}` has no figure here")
    sha256 = sha256_file(figure) if figure.is_file() else "missing"
    link = f"![{docs.inert(result.plan.question)}]({figure.relative_to(beside).as_posix()})"
    return f"{_traced(result)}\n<!-- figure {sha256} -->\n\n{link}"


def _levels_of(result: Result) -> list[str]:
    """A table a launch."""
    parts = []
    for launch in result.plan.launches:
        if results := result.levels(launch):
            label = " (simulated)" if results[0].simulated else ""
            head = f"**{launch.arm}**, launch `{launch.name}`{label}\n<!-- cells {_cells(results)} -->"
            parts.append(f"{head}\n\n{levels_markdown(results)}")
    return parts


def _traced(result: Result) -> str:
    """The run, and every cell whose numbers follow."""
    cells = [
        f"<!-- cells {launch.name}: {_cells(results)} -->"
        for launch in result.plan.launches
        if (results := result.levels(launch))
    ]
    return "\n".join([result.origin, *cells])


def _cells(results: list[LevelResult]) -> str:
    return " ".join(f"{result.level['name']}={result.cell_id[:12]}" for result in results)


def _answered(result: Result) -> Answer:
    if result.answer is None:
        raise InputError(
            f"run `{result.run.run_id}` compares nothing", hint="show its `levels`, or let its recipe compare arms"
        )
    return result.answer


_PARTS: Mapping[str, Callable[[Result], str]] = {
    docs.ALL: _whole,
    "comparison": _comparison,
    "verdict": _verdict,
    "levels": _levels,
    "environment": _environment,
}
