"""The parts of a report that can be told from values: samples, shared JSON, words, charts, figures, the two verbs."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import main, reports
from harness.errors import InputError
from harness.load.records import RequestRecord
from harness.publish import figures
from harness.publish.report import charts, findings, page, samples, shared, shown
from harness.publish.report.drawing import LIGHT
from harness.publish.report.samples import Budget
from harness.stats.arms import Arm, Cell, Launch
from harness.stats.compare import compare

REFERENCES = Path(__file__).parents[2] / "recipes" / "references"
RECORDS = Path(__file__).parents[2] / "docs" / "records"
BASELINE = REFERENCES / "baseline-cu13-coding-prompts.yaml"
EAGLE = REFERENCES / "eagle3-cu13-coding-prompts.yaml"


def level(**offered: Any) -> shown.Level:
    return shown.Level("01-a", "a", Cell("key", offered, {}))


def request(index: int, sent: float, end: float, slot: int = 0) -> RequestRecord:
    return RequestRecord(index, slot, "measure", f"p{index}", sent, end, ok=True)


# Samples


def test_a_spread_keeps_both_ends_and_even_ranks() -> None:
    assert samples.spread(range(101), 5) == [0, 25, 50, 75, 100]
    assert samples.spread([3, 1, 2], 5) == [1, 2, 3]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(2, 60))
def test_a_spread_is_of_the_sample_and_no_larger_than_allowed(values: list[float], most: int) -> None:
    kept = samples.spread(values, most)
    assert len(kept) == min(len(values), most)
    assert set(kept) <= set(values)
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (min(values), max(values))


def test_what_a_level_may_show_shrinks_with_their_number_and_never_to_nothing() -> None:
    few, many = Budget.of(1), Budget.of(100_000)
    assert few.dots >= 60 > many.dots >= 2
    assert few.bars > many.bars >= 1
    assert few.lines > many.lines >= 1


def test_requests_of_an_open_loop_share_rows_only_when_they_do_not_overlap() -> None:
    # 0 and 1 overlap; 2 begins when 0 has ended, 3 when both 1 and 2 still go on.
    records = [request(0, 0.0, 1.0), request(1, 0.5, 3.0), request(2, 1.0, 2.0), request(3, 1.5, 4.0)]
    assert samples.lanes_of(records, level(mode="open", rate=2.0)) == [0, 1, 0, 2]


def test_requests_of_a_closed_loop_stand_in_their_slots() -> None:
    records = [request(0, 0.0, 1.0, slot=3), request(1, 0.0, 1.0, slot=1)]
    assert samples.lanes_of(records, level(mode="closed", concurrency=4)) == [3, 1]


# Shared JSON


def restored(packed: dict[str, Any]) -> Any:
    """What the page's script does, in the fewest words."""

    def meant(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                meant(packed["parts"][value["$"]]) if "$" in value else {key: meant(one) for key, one in value.items()}
            )
        return [meant(one) for one in value] if isinstance(value, list) else value

    return meant(packed["whole"])


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=40)
)
names = st.text(max_size=8).filter(lambda name: name != "$")
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(names, inner), max_leaves=30)


@given(values)
def test_shared_json_means_what_it_was_made_of(value: Any) -> None:
    assert restored(json.loads(json.dumps(shared.pack([value, value, {"again": value}])))) == [
        value,
        value,
        {"again": value},
    ]


def test_a_part_that_repeats_stands_once() -> None:
    config = {"font": "a font whose name takes more than forty characters", "size": 12}
    packed = shared.pack({str(number): {"config": config, "number": number} for number in range(50)})
    assert json.dumps(packed).count("forty characters") == 1


# Words


def test_prose_is_escaped_and_its_literals_are_code() -> None:
    assert page.prose("`a<b>` is <i>faster</i>\u202e") == (
        "<code>a&lt;b&gt;</code> is &lt;i&gt;faster&lt;/i&gt;\\u202e"
    )


def test_arms_of_one_name_are_told_apart_by_the_begin_of_their_runs() -> None:
    def run(name: str) -> shown.Shown:
        launch = shown.Launch("01-a", "a", {}, (), {})
        return shown.Shown(name, Path(name), "?", "done", simulated=False, launches=(launch,))

    alike = [run("2026-01-01T000000-x-1"), run("2026-01-02T000000-x-2")]
    assert list(shown.named(alike).values()) == ["a (2026-01-01T000000)", "a (2026-01-02T000000)"]
    assert list(shown.named(alike[:1]).values()) == ["a"]


def test_runs_of_one_name_in_two_places_are_told_apart_by_their_places(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "same.yaml").write_text(BASELINE.read_text())
    paths = [tmp_path / place / "same.yaml" for place in ("here", "there")]
    known = shown.read_all(paths)
    assert [one.name for one in known] == [str(path) for path in paths]
    chart = charts.throughput(known, LIGHT)
    assert chart is not None
    assert len(chart.data["means"]) == 2 * 3


def test_paths_that_are_no_runs_are_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        shown.read_all([tmp_path / "a", BASELINE, tmp_path / "b"])
    assert len(caught.value.faults) == 2
    assert "`" + str(tmp_path / "b") + "` is not a run" in str(caught.value)


# Charts


def test_throughput_shows_the_numbers_as_they_were_printed() -> None:
    chart = charts.throughput(shown.read_all([BASELINE]), LIGHT)
    assert chart is not None
    [first, *_] = chart.data["means"]
    assert (first["arm"], first["at"], first["value"], first["low"]) == ("baseline", 1, 92.7, None)


def test_an_arm_keeps_its_colour_and_shape_in_charts_that_leave_others_out() -> None:
    known = shown.read_all([BASELINE, EAGLE])
    whole = charts.throughput(known, LIGHT)
    ratio = charts.ratio(shown.between(known), shown.treatments(known), LIGHT)
    assert whole is not None
    assert ratio is not None

    def looks(spec: dict[str, Any]) -> dict[str, tuple[str, str]]:
        marks = spec["layer"][-1]["encoding"]
        scales = [marks[channel]["scale"] for channel in ("color", "shape")]
        return dict(zip(scales[0]["domain"], zip(scales[0]["range"], scales[1]["range"], strict=True), strict=True))

    assert looks(ratio.spec)["eagle3"] == looks(whole.spec)["eagle3"]
    assert looks(whole.spec)["eagle3"] != looks(whole.spec)["baseline"]


def one_launch(name: str, *cells: tuple[int, float, str]) -> Arm:
    return Arm(
        name,
        (
            Launch(name, 0, tuple(
                Cell(f"c{at}", {"mode": "closed", "concurrency": at}, {"output_tok_s": value}, state)
                for at, value, state in cells
            )),
        ),
    )  # fmt: skip


def test_a_hollow_ratio_is_a_suspect_level_and_a_pale_one_is_not_resolved() -> None:
    base = one_launch("base", (1, 100.0, "valid"), (4, 100.0, "valid"), (16, 100.0, "suspect"))
    # 1.05 lies within the 10 % that one launch an arm leaves open; 0.5 and 9 do not.
    treatment = one_launch("t", (1, 50.0, "valid"), (4, 105.0, "valid"), (16, 900.0, "valid"))
    found = compare(base, treatment)
    assert [row.suspect for row in found.rows] == [(), (), ("base",)]
    chart = charts.ratio([found], {}, LIGHT)
    assert chart is not None
    looks = [(row["label"], row["state"], row["settled"]) for row in chart.data["rows"]]
    assert looks == [("C=1", "valid", True), ("C=4", "valid", False), ("C=16", "suspect", True)]
    hollow, filled = chart.spec["layer"][-2:]
    assert hollow["transform"] == [{"filter": "!(datum.state === 'valid')"}]
    for drawn in (hollow, filled):
        assert drawn["encoding"]["opacity"] == {"condition": {"test": "datum.settled", "value": 1}, "value": 0.4}
    assert "Hollow marks are suspect levels." in chart.note
    assert "A pale mark, with a dashed bar where it has one, is a level that is not resolved." in chart.note


def test_the_highest_and_lowest_marks_have_room_on_the_axis_of_ratios() -> None:
    base = one_launch("base", (1, 100.0, "valid"), (4, 100.0, "valid"))
    chart = charts.ratio([compare(base, one_launch("t", (1, 900.0, "valid"), (4, 10.0, "valid")))], {}, LIGHT)
    assert chart is not None
    low, high = chart.spec["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    room = (9 / 0.1) ** 0.08  # 8 % of the distance between the marks 9 and 0.1, on a logarithmic axis
    assert (low, high) == pytest.approx((0.1 / room, 9 * room))


# Records


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*/plan.json")), ids=lambda path: path.parent.name[:28])
def test_a_record_without_its_requests_shows_every_stored_throughput(record: Path) -> None:
    text = page.render(shown.read_all([record.parent]))
    assert f"<h2>{record.parent.name}</h2>" in text
    stored = [json.loads(path.read_text()) for path in record.parent.glob("launches/*/levels/*/level.json")]
    speeds = [level["throughput"]["output_tok_s"] for level in stored]
    assert [speed for speed in speeds if speed is not None and f"<td>{speed:.1f}</td>" not in text] == []


def test_findings_say_what_the_published_levels_lack() -> None:
    [one] = shown.read_all([BASELINE])
    said = [finding.text for finding in findings.validity(one)]
    assert said[0].startswith("Published by others, not measured here")
    assert said[-1] == "All 4 measured levels are valid."
    [answer] = shown.between(shown.read_all([BASELINE, EAGLE]))
    steps = [finding.text for finding in findings.next_steps(one, [answer])]
    assert not any("launches: 3" in text for text in steps), "nobody here can launch what others published"


# Figures and verbs


def test_a_figure_is_a_drawing_with_units_that_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    figures.write_figure([BASELINE, EAGLE], tmp_path / "one.svg")
    texts = [one.text for one in ElementTree.parse(tmp_path / "one.svg").iter("{http://www.w3.org/2000/svg}text")]
    for words in ("output tokens / s", "concurrent requests", "baseline", "eagle3", "published, not measured here"):
        assert words in texts
    figures.write_figure([BASELINE, EAGLE], tmp_path / "other.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_a_png_is_twice_as_fine(tmp_path: Path) -> None:
    figures.write_figure([BASELINE], tmp_path / "figure.png", "pareto", width=300)
    data = (tmp_path / "figure.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20]) == 2 * 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot", BASELINE, "-o", "a.pdf"], "a figure is an .svg or a .png file, got `a.pdf`"),
        (["plot", BASELINE, "-o", "a.svg", "--kind", "ratio"], "nothing to draw as `ratio`"),
        (["plot", BASELINE, EAGLE, "-o", "a.svg", "--kind", "ttft"], "drawn of one run at a time"),
        (["plot", BASELINE, "-o", "a.svg", "--kind", "timeline", "--level", "x/y"], "no finished level `x/y`"),
        (["report", BASELINE, "-o", "report.pdf"], "a report is an .html file, got `report.pdf`"),
        (["report", "nowhere", "-o", "report.html"], "`nowhere` is not a run"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_a_sentence(
    words: list[str | Path], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(word) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_the_verbs_say_what_they_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, figure = tmp_path / "report.html", tmp_path / "figure.svg"
    assert main(["report", str(BASELINE), "-o", str(report), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(report), "bytes": report.stat().st_size, "runs": 1}
    assert main(["plot", str(BASELINE), "-o", str(figure)]) == 0
    assert capsys.readouterr().out == f"{figure}\n"
    assert figure.stat().st_size > 1000


def test_the_same_records_give_the_same_page(tmp_path: Path) -> None:
    known = shown.read_all([BASELINE, EAGLE])
    assert page.render(known) == page.render(known)


def test_a_page_names_no_address_to_load_anything_from() -> None:
    found: list[str | None] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if name in {"href", "src", "srcset", "action", "data"})

    Links().feed(page.render(shown.read_all([BASELINE, EAGLE])))
    assert found
    assert all(link is not None and link.startswith("#") for link in found)


def test_kinds_of_the_verb_are_those_that_can_be_drawn() -> None:
    assert set(reports.KINDS) == set(figures.KINDS)
