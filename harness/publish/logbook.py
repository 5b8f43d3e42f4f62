"""LOGBOOK.md: append-only. The harness adds an entry per run, failures included; people write decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.files import append_line
from harness.publish.docs import inert


@dataclass(frozen=True, slots=True)
class Entry:
    """One run, as the logbook tells it; `state` where it did not end well."""

    date: str
    run_id: str
    recipe: str
    question: str
    verdict: str
    environments: Sequence[str]
    surprises: Sequence[str] = ()
    state: str | None = None

    @property
    def label(self) -> str:
        """What tells an entry from others: a run that failed and was then gone on with has two."""
        return f"- run: `{self.run_id}`" + (f" ({self.state});" if self.state else ";")

    def text(self) -> str:
        """The entry as Markdown: of each text one line, in which nothing begins an entry or a block."""
        lines = [
            f"## {self.date} run: {self.recipe}",
            "",
            f"- question: {self.question}",
            f"- answer: {self.verdict}",
            f"{self.label} environment: {', '.join(self.environments) or 'none'}",
            *(f"- note: {surprise}" for surprise in self.surprises),
        ]
        return "\n".join(map(inert, lines)) + "\n"


def append(path: Path, entry: Entry) -> bool:
    """Add an entry; a run that is already there in this state is not added twice. Returns whether it was added."""
    if not path.is_file():
        raise InputError(f"there is no `{path}`", hint="make LOGBOOK.md with a title line; the harness only appends")
    text = path.read_text(encoding="utf-8")
    if any(line.startswith(entry.label) for line in text.split("\n")):  # not where another entry quotes it
        return False
    gap = "" if text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
    append_line(path, gap + entry.text().rstrip("\n"))
    return True
