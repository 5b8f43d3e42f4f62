"""Reports in a real headless Chromium: what the page says to a reader, a keyboard, a printer and an attacker."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report_runs
from opened_page import Opened

from harness.publish.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed here")
CHROMIUM = os.environ.get("HARNESS_CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser; for one module only, because playwright keeps an event loop running."""
    if CHROMIUM is None:
        pytest.skip("no `chromium` here: `apt-get install chromium`, or name one in $HARNESS_CHROMIUM")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Open a report: `visit(path, width=1280, scheme="light")`."""
    contexts = []

    def open_page(path: Path, *, width: int = 1280, scheme: str = "light", **more: Any) -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.console.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.console.append(f"error: {error}"))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("dialog", opened.dismiss)
        opened.page.goto(path.as_uri())
        opened.drawn()
        return opened

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on the simulated engine: two arms, two launches each, four levels."""
    return report_runs.record(tmp_path_factory.mktemp("recorded") / "project")


@pytest.fixture(scope="session")
def report(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of that run."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report([recorded], path)
    return path


@pytest.fixture(scope="session")
def artefacts() -> Path:
    """Where screenshots are kept: `$HARNESS_ARTEFACTS`, else `build/report`."""
    root = os.environ.get("HARNESS_ARTEFACTS")
    folder = Path(root) if root else Path(__file__).parents[2] / "build"
    (folder / "report").mkdir(parents=True, exist_ok=True)
    return folder / "report"
