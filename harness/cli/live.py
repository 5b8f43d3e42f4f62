"""What a run shows while it goes: on a terminal its plan as a tree that fills in, elsewhere a line for each event.

The tree is talk: it goes to stderr, and is drawn where stderr is a terminal. Results go to stdout and never through it.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.cli.talk import Talk, safe
from harness.errors import HarnessError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

    from harness.recipe.plan import Plan
    from harness.run.glance import Glance, Seen
    from harness.run.store import Run
    from harness.stats.level import LevelResult

_WAITING, _MEASURING = "waiting", "measuring"
_DONE = "done"
_LOOK_S = 1.0  # between looks into the files of the level that is measured
_DRAWN_S = 0.5  # between two drawings of the tree: an ssh line is not to be filled with them
_NEAR = 3  # launches shown on either side of the one that goes on
_COLUMNS = ("", "done", "active", "tok/s", "TTFT ms", "errors", "accept", "lag ms")


@dataclass
class _Level:
    """One level of the tree, by what is known of it; times in seconds."""

    name: str
    of: int | None = None
    state: str = _WAITING
    done: int = 0
    active: int | None = None
    failed: int = 0
    tok_s: float | None = None
    ttft_s: float | None = None
    accept: float | None = None
    lag_s: float | None = None
    began: float = 0.0
    took_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether it is measured."""
        return self.state not in {_WAITING, _MEASURING}


@dataclass
class _Launch:
    """One launch of the tree."""

    name: str
    levels: dict[str, _Level] = field(default_factory=dict)
    stage: str = _WAITING
    began: float | None = None

    @property
    def over(self) -> bool:
        """Whether every level of it is measured."""
        return all(level.over for level in self.levels.values())


class LiveView:
    """Turns a run's events into talk; `with` it, and hand `tell` to the run.

    Args:
        talk: who speaks; quiet ones show nothing, verbose ones more lines.
        cells: how many levels there are in all.
        run: the run, for the tree and for what its files say meanwhile; without one there are lines only.
    """

    def __init__(self, talk: Talk, cells: int, run: "Run | None" = None) -> None:
        self._talk = talk
        self._cells = cells
        self._run = run
        self._started = time.monotonic()
        self._launches: dict[str, _Launch] = {}
        self._reused = 0
        self._console: Console = talk.console(stderr=True)
        self._live: Live | None = None
        self._glance: Glance | None = None
        self._seen: Seen | None = None
        self._looked = 0.0

    def __enter__(self) -> "LiveView":
        if self._talk.quiet:
            return self
        if self._run is not None:
            self._plant(self._run.plan())
        console = self._console
        if self._run is not None and console.is_terminal and not console.is_dumb_terminal:
            from rich.live import Live

            # Neither stream is redirected: what a verb writes to stdout must arrive there.
            self._live = Live(
                console=console,
                get_renderable=self._tree,
                refresh_per_second=1 / _DRAWN_S,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._glance = self._seen = None
            self._live.stop()
            self._live = None

    def tell(self, kind: str, **facts: Any) -> None:
        """One event of the run."""
        handler: Callable[..., None] | None = getattr(self, f"_on_{kind.replace('-', '_')}", None)
        if handler:
            handler(**facts)
        elif "text" in facts:
            self._line(str(facts["text"]))

    @property
    def drawn(self) -> bool:
        """Whether the tree is on a terminal: then levels show in it, and not as lines."""
        return self._live is not None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Room for lines on stdout: where that is the same terminal, the tree steps aside meanwhile."""
        if self._live is None or not sys.stdout.isatty():
            yield
            return
        self._live.transient = True
        self._live.stop()
        try:
            yield
            sys.stdout.flush()
        finally:
            self._live.transient = False
            self._live.start(refresh=True)

    # Events

    def _on_launch(self, *, launch: str, text: str, **_: Any) -> None:
        known = self._launch(launch)
        known.stage, known.began = safe(text), known.began or time.monotonic()
        if self._live is None or self._talk.verbose:
            self._line(f"[{launch}] {text}")

    def _on_milestone(self, *, launch: str, name: str, seconds: float, **_: Any) -> None:
        self._launch(launch).stage = f"{seconds:.1f} s: {safe(name)}"
        if self._live is None or self._talk.verbose:
            self._line(f"[{launch}]   {seconds:6.1f} s  {name}")

    def _on_level_start(self, *, launch: str, level: str, requests: int | None, **_: Any) -> None:
        known = self._level(launch, level)
        known.state, known.of, known.began = _MEASURING, requests, time.monotonic()
        self._launch(launch).stage = f"measuring {level}"
        self._glance = self._seen = None
        if self._live is not None and self._run is not None:
            from harness.run.glance import Glance

            self._glance = Glance(self._run, launch, level)
        elif self._talk.verbose:
            self._line(f"[{launch}] {level}: {requests} requests")

    def _on_level_progress(
        self, *, done: int, active: int, failed: int, launch: str = "", level: str = "", **_: Any
    ) -> None:
        known = self._level(launch, level)
        known.done, known.active, known.failed = done, active, failed
        if self._glance is not None and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self._look(known, self._glance)

    def _look(self, known: _Level, glance: "Glance") -> None:
        """What the level's files say by now; a file that cannot be read costs its figures, and never the run."""
        try:
            self._seen = seen = glance.look()
        except (OSError, ValueError, LookupError, HarnessError) as error:
            self._glance = None
            self._detail(f"no more live figures of this level: {error}")
            return
        known.tok_s, known.ttft_s = seen.tok_s, seen.ttft_s
        known.accept, known.lag_s = seen.acceptance_length, seen.lag_s

    def _on_level_done(
        self, *, launch: str, result: "LevelResult", level: str = "", reused: bool = False, **_: Any
    ) -> None:
        known = self._level(launch, level or str(result.level["name"]))
        self._fill(known, result)
        self._reused += reused
        self._glance = self._seen = None
        if self._live is None:
            from harness.publish.tables import seeds_row

            self._line(f"[{launch}] {seeds_row(result)}{'  (reused)' if reused else self._left()}")
        for reason in result.verdict.reasons:
            self._line(f"[{launch}] {known.name} {result.verdict.state}: {reason.message}")

    def _fill(self, known: _Level, result: "LevelResult") -> None:
        """A level of the tree by its result."""
        ttft = result.metrics.get("ttft_s")
        known.state, known.active = result.verdict.state, None
        known.done, known.of, known.failed = result.requests, result.requests, result.requests - result.ok
        known.tok_s = result.throughput.output_tok_s or result.throughput.output_tok_s_whole
        known.ttft_s = ttft.mean if ttft else None
        known.accept = result.server.get("acceptance_length")
        known.lag_s = result.client.get("lag_p99_s")
        known.took_s = time.monotonic() - known.began if known.began else None

    # State

    def _plant(self, plan: "Plan") -> None:
        """The tree as the plan has it, with what the run holds already."""
        for launch, cell in plan.cells():
            known = self._launch(launch.name)
            known.levels.setdefault(cell.level.name, _Level(cell.level.name, cell.level.requests))

    def _launch(self, name: str) -> _Launch:
        return self._launches.setdefault(name, _Launch(name))

    def _level(self, launch: str, name: str) -> _Level:
        return self._launch(launch).levels.setdefault(name, _Level(name))

    def _levels(self) -> list[_Level]:
        return [level for launch in list(self._launches.values()) for level in list(launch.levels.values())]

    def _left(self) -> str:
        """How far the run is and how long it may still take, after a level's line; nothing within the last minute."""
        left = self._left_s()
        done = sum(level.over for level in self._levels())
        return f"  [{done}/{self._cells}, about {left / 60:.0f} min left]" if left is not None and left > 60 else ""

    def _left_s(self) -> float | None:
        """Seconds that are left: a level takes as long as others of its name took, else as long as levels take."""
        levels = self._levels()
        took = [level.took_s for level in levels if level.took_s is not None]
        measured = sum(level.over for level in levels) - self._reused
        if not took or measured <= 0:
            return None
        overhead = max(0.0, time.monotonic() - self._started - sum(took)) / measured
        total = 0.0
        for level in levels:
            if level.over:
                continue
            same = [one.took_s for one in levels if one.name == level.name and one.took_s is not None]
            expected = sum(same) / len(same) if same else sum(took) / len(took)
            spent = time.monotonic() - level.began if level.state == _MEASURING else 0.0
            total += max(0.0, expected - spent) + overhead
        unknown = self._cells - len(levels)  # of launches that nobody has told of yet
        return total + max(0, unknown) * (sum(took) / len(took) + overhead)

    # Lines and the tree

    def _line(self, text: str) -> None:
        if self._talk.quiet:
            return
        if self._live:
            self._console.print(safe(text), markup=False, highlight=False, soft_wrap=True)
        else:
            self._talk.line(safe(text))

    def _detail(self, text: str) -> None:
        if self._talk.verbose:
            self._line(text)

    def _tree(self) -> "RenderableType":
        """The whole run, as high as the terminal allows: launches near the one that goes on, its levels in rows."""
        from rich.console import Group
        from rich.text import Text
        from rich.tree import Tree

        names = list(self._launches)  # a copy: this is drawn by a thread of its own
        at = next((index for index, name in enumerate(names) if self._goes_on(name)), len(names) - 1)
        first, last = _window(at, len(names), self._console.size.height)
        tree = Tree(Text(self._head(), overflow="ellipsis", no_wrap=True), guide_style="dim")
        if first:
            tree.add(Text(f"... {first} launches before", style="dim"))
        for name in names[first:last]:
            branch = tree.add(self._told(self._launches[name]))
            if self._goes_on(name) or len(names) == 1:
                branch.add(_rows(list(self._launches[name].levels.values())))
        if last < len(names):
            tree.add(Text(f"... {len(names) - last} launches to come", style="dim"))
        return Group(tree, *self._gpus())

    def _goes_on(self, name: str) -> bool:
        launch = self._launches[name]
        return launch.began is not None and not launch.over

    def _head(self) -> str:
        levels = self._levels()
        spent, left = time.monotonic() - self._started, self._left_s()
        over = sum(level.over for level in levels)
        eta = f", about {_span(left)} left" if left is not None and over < self._cells else ""
        recipe = safe(str(self._run.state().get("recipe", ""))) if self._run else ""
        return f"{recipe}  {over} of {self._cells} levels, {_span(spent)}{eta}"

    def _told(self, launch: _Launch) -> "RenderableType":
        """One launch in a line: its stage, or what its levels came to."""
        from rich.text import Text

        if launch.over and launch.levels:
            bad = [level.name for level in launch.levels.values() if level.state not in {"valid"}]
            rates = "  ".join(f"{level.name} {_fixed(level.tok_s)}" for level in launch.levels.values())
            text = f"{launch.name}  {rates} tok/s" + (f"  ({len(bad)} not valid)" if bad else "")
            return Text(text, style="dim" if not bad else "", overflow="ellipsis", no_wrap=True)
        style = "dim" if launch.stage == _WAITING else "bold"
        return Text(f"{launch.name}  {launch.stage}", style=style, overflow="ellipsis", no_wrap=True)

    def _gpus(self) -> "list[RenderableType]":
        """A line a GPU, for a few; one for all of many."""
        from rich.text import Text

        gpus = self._seen.gpus if self._seen else ()
        lines = [
            f"GPU {gpu.index}  {_fixed(gpu.power_w, 0)} W  {gpu.sm_mhz or '-'} MHz  {_gib(gpu.memory_used)} GiB"
            for gpu in gpus
        ]
        if len(gpus) > 2:
            watts = [gpu.power_w for gpu in gpus if gpu.power_w is not None]
            clocks = [gpu.sm_mhz for gpu in gpus if gpu.sm_mhz is not None]
            used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
            clock = f"{min(clocks)} to {max(clocks)}" if clocks else "-"
            lines = [f"{len(gpus)} GPUs  {sum(watts):.0f} W  {clock} MHz  {_gib(sum(used))} GiB"]
        return [Text(line, overflow="ellipsis", no_wrap=True) for line in lines]


def _rows(levels: Sequence[_Level]) -> "Table":
    """The levels of the launch that goes on."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for level in levels:
        waits = level.state == _WAITING
        cells = (
            level.name,
            "-" if waits else f"{level.done}/{level.of}" if level.of else str(level.done),
            "-" if level.active is None else str(level.active),
            _fixed(level.tok_s),
            _fixed(level.ttft_s, 1, 1e3),
            "-" if waits else str(level.failed),
            _fixed(level.accept, 2),
            _fixed(level.lag_s, 1, 1e3),
            level.state,
        )
        table.add_row(*cells, style=_STYLES.get(level.state, ""))
    return table


_STYLES = {_WAITING: "dim", _MEASURING: "bold", "suspect": "yellow", "invalid": "red"}


def _window(at: int, count: int, height: int) -> tuple[int, int]:
    """The launches to show: all where they fit, else some around the one that goes on."""
    room = max(1, height - 14)
    near = min(_NEAR, room // 2)
    if count <= max(2 * near + 1, room):
        return 0, count
    first = min(max(0, at - near), count - 2 * near - 1)
    return first, first + 2 * near + 1


def _fixed(value: float | None, digits: int = 1, times: float = 1.0) -> str:
    return "-" if value is None else f"{value * times:.{digits}f}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / (1 << 30):.1f}"


def _span(seconds: float) -> str:
    """Seconds as people say them: `42 s`, `3:12`, `1:03:20`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
