#!/usr/bin/env python3
"""How large a report is and how long a browser takes to open it, beside an empty page.

    python benchmarks/report.py                         one run, ten, a hundred; a minute
    python benchmarks/report.py --runs 100 --rounds 5   only a hundred runs, each page opened five times

Each run has two arms of one launch and eight levels. A page counts as open when the window's content is drawn.
On a busy machine read the ratios, not the seconds: pages and the empty one are opened in turn.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import report_runs
from playwright.sync_api import sync_playwright

from harness.publish.report import write_report

DRAWN = """
[...document.querySelectorAll('[data-figure]:not([data-drawn])')].filter(one =>
  !one.closest('details:not([open])') && one.getBoundingClientRect().top < innerHeight).length === 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, action="append", metavar="N", help="runs in a report (default: 1, 10, 100)")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    counts = asked.runs or [1, 10, 100]
    chromium = os.environ.get("HARNESS_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.exit("no `chromium` here: `apt-get install chromium`, or name one in $HARNESS_CHROMIUM")
    with tempfile.TemporaryDirectory() as folder:
        pages, sizes, made = write(Path(folder), counts)
        seconds = measure(pages, chromium, asked.rounds)
    empty = statistics.median(seconds["empty"])
    print(f"{'page':>10} {'MB':>6} {'written s':>9} {'open s':>7} {'against an empty page':>22}")
    for name, took in seconds.items():
        middle = statistics.median(took)
        print(f"{name:>10} {sizes[name] / 1e6:6.2f} {made[name]:9.1f} {middle:7.2f} {middle / empty:22.1f}")


def write(folder: Path, counts: list[int]) -> tuple[dict[str, Path], dict[str, int], dict[str, float]]:
    """The pages by name, their sizes, and how long each took to write."""
    runs = report_runs.grow(report_runs.record(folder / "project"), folder / "runs", max(counts))
    pages, sizes, made = {"empty": folder / "empty.html"}, {"empty": 0}, {"empty": 0.0}
    pages["empty"].write_text("<!doctype html><html lang=en><title>empty</title>")
    for count in counts:
        name = f"{count} runs"
        pages[name] = folder / f"{count}.html"
        began = time.monotonic()
        sizes[name] = write_report(runs[:count], pages[name])
        made[name] = time.monotonic() - began
    return pages, sizes, made


def measure(pages: dict[str, Path], chromium: str, rounds: int) -> dict[str, list[float]]:
    """Seconds until each page is open, every page once a round."""
    seconds: dict[str, list[float]] = {name: [] for name in pages}
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        for _ in range(rounds):
            for name, path in pages.items():
                seconds[name].append(opened(browser, path))
        browser.close()
    return seconds


def opened(browser: Any, path: Path) -> float:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    began = time.monotonic()
    page.goto(path.as_uri())
    while not page.evaluate(DRAWN):
        pass
    took = time.monotonic() - began
    context.close()
    return took


if __name__ == "__main__":
    main()
