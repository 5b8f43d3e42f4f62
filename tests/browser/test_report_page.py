"""What a report is in a browser."""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_runs
from opened_page import Opened

from harness.publish.report import write_report

Visit = Callable[..., Opened]
ROOT = Path(__file__).parents[2]
MOST_BYTES = 8_000_000


def levels(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in run.glob("launches/*/levels/*/level.json")]


def test_the_page_asks_for_nothing_and_complains_of_nothing_whatever_is_opened(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.open_everything()
    for number in range(opened.page.locator("select").count()):
        choice = opened.page.locator("select").nth(number)
        for option in range(choice.locator("option").count()):
            choice.select_option(index=option)
            opened.drawn()
    assert opened.requests == [report.as_uri()]
    assert opened.console == []


def test_nothing_but_its_own_script_and_style_may_run(report: Path, visit: Visit) -> None:
    opened = visit(report)
    policy = opened.page.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert all(one.startswith("'sha256-") for one in (rules["script-src"] + " " + rules["style-src"]).split())
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert opened.page.evaluate("window.ran") is None
    assert len(opened.console) == 1
    assert "Content Security Policy" in opened.console[0]


def test_answer_and_findings_are_on_top_in_words(report: Path, recorded: Path, visit: Visit) -> None:
    [comparison] = json.loads((recorded / "comparison.json").read_text())["comparisons"]
    opened = visit(report)
    said = opened.page.locator(".answer").inner_text()
    assert "speculative against baseline" in said
    assert comparison["policy"]["decision"] in said
    for row in comparison["rows"]:
        assert row["verdict"] in said
    assert opened.page.locator("header").inner_text().count("Simulated.") == 1
    assert "Nothing else differs between the arms" in opened.page.locator(".findings").inner_text()
    top = opened.page.locator(".answer").bounding_box()
    assert top is not None
    assert top["y"] < 900, "the answer is on the first screen"


def test_the_table_behind_a_drawing_holds_means_over_launches(report: Path, recorded: Path, visit: Visit) -> None:
    speeds: dict[tuple[str, str], list[float]] = {}
    for level in levels(recorded):
        key = level["arm"], f"C={level['level']['concurrency']}"
        speeds.setdefault(key, []).append(level["throughput"]["output_tok_s"])
    opened = visit(report)
    behind = opened.page.locator("[data-behind=run-1-throughput]")
    behind.locator("summary").click()
    rows = [row.locator("td").all_inner_texts() for row in behind.locator("tbody tr").all()]
    assert len(rows) == len(speeds) == 8
    for arm, label, mean, low, high, launches, _ in rows:
        one, other = speeds[arm, label]
        assert float(mean) == pytest.approx(math.sqrt(one * other), rel=1e-4)
        # Student's t with one degree of freedom: 12.706 times the standard error, on the logarithms.
        half = 12.7062 * abs(math.log(one / other)) / 2
        assert float(low) == pytest.approx(math.sqrt(one * other) * math.exp(-half), rel=1e-3)
        assert float(high) == pytest.approx(math.sqrt(one * other) * math.exp(half), rel=1e-3)
        assert launches == "2"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_is_readable_at_every_width_in_both_schemes(
    report: Path, visit: Visit, artefacts: Path, width: int, scheme: str
) -> None:
    opened = visit(report, width=width, scheme=scheme)
    opened.page.screenshot(path=artefacts / f"report-{width}-{scheme}.png", full_page=True)
    opened.open_everything()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
    smallest = opened.page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].filter(one => one.getBBox().width).map(one => {"
        "  const { a, b } = one.getScreenCTM();"
        "  return parseFloat(getComputedStyle(one).fontSize) * Math.hypot(a, b); }))"
    )
    assert smallest >= 10.5, "no chart is shrunk until its labels cannot be read"


@pytest.mark.parametrize(("scheme", "rules"), [("light", None), ("dark", {"runOnly": ["color-contrast"]})])
def test_checks_of_accessibility_find_nothing(
    report: Path, visit: Visit, scheme: str, rules: dict[str, list[str]] | None
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed here")
    opened = visit(report, scheme=scheme)
    opened.open_everything()
    found = axe.Axe().run(opened.page, options=rules)
    assert found.violations_count == 0, found.generate_report()


def test_the_button_turns_colours_around_and_says_what_it_does(report: Path, visit: Visit) -> None:
    opened = visit(report)
    button = opened.page.locator("#theme")
    assert button.inner_text() == "Dark"
    button.click()
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    line = opened.page.locator("#run-1-throughput path[stroke='var(--series-1)']").first
    assert line.evaluate("one => getComputedStyle(one).stroke") == "rgb(86, 180, 233)"
    assert button.inner_text() == "Light"


def test_the_keyboard_reaches_everything_in_reading_order(report: Path, visit: Visit) -> None:
    opened = visit(report)
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0, (
        "it is seen while it has the focus"
    )
    page.evaluate("window.passed = [document.activeElement]")
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body || window.passed.includes(document.activeElement)"):
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.evaluate("window.passed.push(document.activeElement)")
    assert page.evaluate(
        "window.passed.every((one, place) => !place ||"
        " window.passed[place - 1].compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING)"
    )
    reachable = "a[href], button, select, summary, [tabindex='0']"
    missed = page.evaluate(
        f'[...document.querySelectorAll("{reachable}")].filter(one => one.checkVisibility()'
        " && !window.passed.includes(one)).map(one => one.outerHTML.slice(0, 80))"
    )
    assert missed == []


def test_the_skip_link_leads_to_the_answer(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"


def test_commands_are_copied_as_they_stand(report: Path, recorded: Path, visit: Visit) -> None:
    opened = visit(report, permissions=["clipboard-read", "clipboard-write"])
    opened.page.locator("[data-copy=run-1-reproduce]").click()
    opened.page.locator("[data-copy=run-1-reproduce]", has_text="Copied").wait_for()
    plan = json.loads((recorded / "plan.json").read_text())
    assert (
        opened.page.evaluate("navigator.clipboard.readText()").splitlines()[-1] == f"harness run {plan['recipe_path']}"
    )


def test_on_paper_it_is_light_and_has_no_buttons(report: Path, visit: Visit, artefacts: Path) -> None:
    opened = visit(report, scheme="dark")
    opened.page.emulate_media(media="print")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not any(button.is_visible() for button in opened.page.locator("button").all())
    opened.page.pdf(path=artefacts / "report.pdf", format="A4")
    assert (artefacts / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_mark_says_what_it_is(report: Path, visit: Visit) -> None:
    opened = visit(report)
    mark = opened.page.locator("#run-1-throughput .role-mark.mark-symbol path").last
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    said = opened.page.locator("#tip").inner_text()
    assert "tok/s" in said
    assert "C=" in said


def test_no_text_of_a_run_can_run(recorded: Path, visit: Visit, tmp_path: Path, artefacts: Path) -> None:
    poisoned = report_runs.poison(recorded, tmp_path / "runs")
    path = tmp_path / "poisoned.html"
    write_report([poisoned, recorded], path)
    opened = visit(path)
    opened.open_everything()
    for choice in opened.page.locator("select").all():
        choice.select_option(index=choice.locator("option").count() - 1)
    opened.drawn()
    told = opened.page.evaluate(
        "[...document.querySelectorAll('[data-figure] .role-mark path')].map(mark => {"
        "  const at = { bubbles: true, clientX: 200, clientY: 200 };"
        "  ['pointerover', 'pointermove'].forEach(kind => mark.dispatchEvent(new PointerEvent(kind, at)));"
        "  return document.getElementById('tip').textContent; }).join()"
    )
    assert report_runs.TAG in told, "tips were shown, as text"
    opened.page.screenshot(path=artefacts / "report-poisoned.png", full_page=True)
    assert opened.page.evaluate("window.pwned") is None
    assert opened.dialogs == []
    assert opened.console == [], "not even blocked: it is text"
    assert opened.requests == [path.as_uri()]
    assert opened.page.evaluate("document.querySelectorAll('img, main a[href^=javascript], main script').length") == 0
    text = opened.page.locator("body").inner_text()
    assert report_runs.TAG in text
    assert report_runs.SCRIPT in text
    assert "\u202e" not in text, "letters that turn text around are shown as their numbers"


def unchanged_run(run: Path) -> None:
    """As it was recorded."""


def killed_run(run: Path) -> None:
    (run / "comparison.json").unlink()
    last = sorted(run.glob("launches/*"))[-1]
    shutil.rmtree(last)
    (sorted(run.glob("launches/*"))[-1] / "levels" / "c8" / "level.json").unlink()
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"state": "running"}))


def failed_run(run: Path) -> None:
    (run / "comparison.json").unlink()
    for launch in sorted(run.glob("launches/*"))[1:]:
        shutil.rmtree(launch)
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"state": "failed", "error": "server `x` died\n\nhint: look"}))


def unstarted_run(run: Path) -> None:
    shutil.rmtree(run / "launches")
    (run / "comparison.json").unlink()
    (run / "facts.json").unlink()
    (run / "run.json").unlink()


def one_level(run: Path) -> None:
    for level in run.glob("launches/*/levels/*"):
        if level.name != "c4":
            shutil.rmtree(level)


def invalid_levels(run: Path) -> None:
    for path in run.glob("launches/*/levels/c8/level.json"):
        level = json.loads(path.read_text())
        level["verdict"] = {"state": "invalid", "reasons": [{"code": "failed", "message": "12 of 12 requests failed"}]}
        level["throughput"]["output_tok_s"] = None
        level["metrics"] = {}
        path.write_text(json.dumps(level))


def without_requests(run: Path) -> None:
    for path in [*run.rglob("requests.jsonl"), *run.rglob("server.log"), run / "events.jsonl"]:
        path.unlink()


def open_loop(run: Path) -> None:
    for path in run.glob("launches/*/levels/*/level.json"):
        level = json.loads(path.read_text())
        level["level"] |= {"mode": "open", "rate": float(level["level"]["concurrency"]), "concurrency": None}
        path.write_text(json.dumps(level))


def damaged(run: Path) -> None:
    (run / "comparison.json").write_text('{"format": "harness.answer/9"}')
    next(run.glob("launches/*/levels/c1/level.json")).write_text("{")
    next(run.glob("launches/*/levels/c2/requests.jsonl")).write_text('{"index": 1}\n')


CASES = {
    unchanged_run: ["Nothing else differs between the arms", "Time to first token by level", "Requests over time"],
    killed_run: ["killed", "No comparison is stored", "not finished", "not begun"],
    failed_run: ["The run is not complete, but failed: server x died.", "--resume"],
    unstarted_run: ["No level is finished", "Nothing to draw"],
    one_level: ["not begun", "Throughput over concurrency"],
    invalid_levels: ["invalid", "12 of 12 requests failed"],
    without_requests: ["Throughput over concurrency", "Levels"],
    open_loop: ["Throughput over offered rate", "Time per output token by level"],
    damaged: ["is not valid JSON", "does not read as Answer", "no request as the client", "Requests over time"],
}


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_whatever_became_of_a_run_its_report_says_so(
    change: Callable[[Path], None], recorded: Path, visit: Visit, tmp_path: Path
) -> None:
    run = report_runs.copied(recorded, tmp_path)
    change(run)
    write_report([run], tmp_path / "report.html")
    opened = visit(tmp_path / "report.html")
    opened.open_everything()
    text = opened.page.locator("body").inner_text()
    assert [words for words in CASES[change] if words not in text] == []
    assert opened.console == []


def test_published_tables_are_compared_and_say_that_they_were_not_measured(visit: Visit, tmp_path: Path) -> None:
    folder = ROOT / "recipes" / "references"
    names = ("baseline-cu13-coding-prompts.yaml", "eagle3-cu13-coding-prompts.yaml")
    write_report([folder / name for name in names], tmp_path / "report.html")
    opened = visit(tmp_path / "report.html")
    text = opened.page.locator("body").inner_text()
    assert "Published by others, not measured here" in text
    assert "eagle3 against baseline" in text
    assert "92.7" in text  # as printed for C=1
    assert opened.console == []


def test_a_hundred_runs_of_eight_levels_are_small_and_open(
    recorded: Path, visit: Visit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = report_runs.grow(recorded, tmp_path / "runs", 100)
    path = tmp_path / "many.html"
    size = write_report(runs, path)
    assert size < MOST_BYTES
    began = time.monotonic()
    opened = visit(path)
    took = time.monotonic() - began
    with capsys.disabled():
        print(f"\n100 runs of 2 arms x 8 levels: {size / 1e6:.2f} MB, open and drawn in {took:.2f} s")  # noqa: T201
    assert opened.page.locator("details.run").count() == 100
    opened.page.locator("table.runs a").nth(57).click()
    opened.drawn()
    assert opened.page.locator("details.run[open]").count() == 1
    assert opened.page.locator("#run-58-throughput svg").is_visible()
    assert opened.console == []
