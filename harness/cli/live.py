"""What a run shows while it goes: a line for each thing that happened, and on a terminal one moving line below them."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, safe

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from harness.stats.level import LevelResult


class LiveView:
    """Turns a run's events into talk; `with` it, and hand `tell` to the run.

    On a terminal the current level moves in place (requests done, in flight, tokens a second, time left); elsewhere
    only whole lines are written, one for each event.
    """

    def __init__(self, talk: Talk, cells: int) -> None:
        self._talk = talk
        self._cells = cells
        self._done = 0
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}  # by launch: on a cluster several go at once

    def __enter__(self) -> "LiveView":
        console = self._talk.console(stderr=True)
        if console.is_terminal and not self._talk.quiet:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[note]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def tell(self, kind: str, **facts: Any) -> None:
        """One event of the run."""
        handler: Callable[..., None] | None = getattr(self, f"_on_{kind.replace('-', '_')}", None)
        if handler:
            handler(**facts)
        elif "text" in facts:
            self._line(str(facts["text"]))

    def _line(self, text: str) -> None:
        if self._talk.quiet:
            return
        if self._progress:
            self._progress.console.print(safe(text), markup=False, highlight=False, soft_wrap=True)
        else:
            self._talk.line(safe(text))

    def _on_launch(self, *, launch: str, text: str, **_: Any) -> None:
        self._line(f"[{launch}] {text}")

    def _on_milestone(self, *, launch: str, name: str, seconds: float, **_: Any) -> None:
        self._line(f"[{launch}]   {seconds:6.1f} s  {name}")

    def _on_level_start(self, *, launch: str, level: str, requests: int | None, **_: Any) -> None:
        if self._progress:
            self._tasks[launch] = self._progress.add_task(
                f"[{launch}] {level}".replace("[", "\\["), total=requests or 1, note=""
            )
        elif self._talk.verbose:
            self._line(f"[{launch}] {level}: {requests} requests")

    def _on_level_progress(self, *, launch: str, done: int, active: int, failed: int, **_: Any) -> None:
        if self._progress and launch in self._tasks:
            note = f"in flight {active}" + (f"  failed {failed}" if failed else "")
            self._progress.update(self._tasks[launch], completed=done, note=note)

    def _on_level_done(self, *, launch: str, result: "LevelResult", reused: bool = False, **_: Any) -> None:
        from harness.publish.tables import seeds_row

        if self._progress and launch in self._tasks:
            self._progress.remove_task(self._tasks.pop(launch))
        self._done += 1
        self._line(f"[{launch}] {seeds_row(result)}{'  (reused)' if reused else self._left()}")
        for reason in result.verdict.reasons:
            self._line(f"[{launch}]   {result.verdict.state}: {reason.message}")

    def _left(self) -> str:
        """How much of the run is left, judged by the cells done so far."""
        spent = time.monotonic() - self._started
        left = spent / self._done * (self._cells - self._done)
        return f"  [{self._done}/{self._cells}, about {left / 60:.0f} min left]" if left > 60 else ""
