"""A trace of what a server does while a level runs: `profile` in a recipe. It is kept in the level's own folder.

The server is asked to trace itself once the level has been at its concurrency for a while, and to stop some seconds
later. Tracing slows it down, so the level's verdict says that it was traced.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from harness.engines.engine import Profiles
from harness.recipe.plan import PlannedLevel
from harness.run import launch as launching
from harness.run.launch import Launched

_START_S = 60.0  # a server under load answers late
_WRITE_S = 600.0  # eight ranks write hundreds of megabytes each before they answer
_APPEAR_S = 30.0  # a server that answers first and writes then
_LOOK_S = 0.2


class Profiler:
    """A context around one level; afterwards `facts` says what was traced, or why not.

    Without `profile` in the plan, or with an engine that has no such thing, it does nothing.
    """

    def __init__(self, server: Launched, level: PlannedLevel, folder: Path) -> None:
        self._server = server
        self._level = level
        self._folder = folder.resolve() / "profile"  # the server may have another working directory
        self._steady = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> "Profiler":
        engine = self._server.engine
        if self._level.profile is not None and isinstance(engine, Profiles):
            self._thread = threading.Thread(target=self._trace, args=(engine,), name="profile", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._steady.set()
        if self._thread is not None:
            self._thread.join(_START_S + _WRITE_S + _APPEAR_S)

    def seen(self, counts: Mapping[str, Any]) -> None:
        """Told how the level goes: `active` is how many requests are in flight."""
        if counts.get("active", 0) >= (self._level.concurrency or 1):
            self._steady.set()

    @property
    def facts(self) -> dict[str, Any]:
        """`profile`: `seconds` traced, `files` by name with their size in bytes, `trouble` if any; else nothing."""
        return {"profile": self._facts} if self._facts else {}

    def _trace(self, engine: Profiles) -> None:
        wanted = self._level.profile or {}
        self._steady.wait()
        if self._over.wait(wanted["after_s"]):
            self._facts = {"trouble": f"the level was over before it had been steady for {wanted['after_s']:g} s"}
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._ask(*engine.start_profile(str(self._folder)), patience_s=_START_S)
            began = time.monotonic()
            self._over.wait(wanted["seconds"])
            lasted = time.monotonic() - began
            self._ask(engine.stop_profile, {}, patience_s=_WRITE_S)
        except requests.RequestException as error:
            self._facts = {"trouble": f"the server could not be traced: {error}"}
            return
        files = self._written()
        trouble = {} if files else {"trouble": "the server wrote no trace"}
        self._facts = {"seconds": round(lasted, 3), "files": files, **trouble}

    def _ask(self, path: str, body: Mapping[str, Any], *, patience_s: float) -> None:
        with launching.control_session(self._server.server) as session:
            session.post(self._server.base_url + path, json=body, timeout=patience_s).raise_for_status()

    def _written(self) -> dict[str, int]:
        """The trace's files; waited for, as long as there is none."""
        until = time.monotonic() + _APPEAR_S
        while not (found := [path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size]):
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_S)
        return {str(path.relative_to(self._folder)): path.stat().st_size for path in sorted(found)}
