"""YAML with positions, strict models, all faults at once."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from harness.errors import InputError
from harness.strict import Strict, merge, parse, read, read_text


class Inner(Strict):
    levels: tuple[int, ...] = Field(min_length=1)
    mode: Literal["open", "closed"] = "closed"
    share: float = Field(default=0.5, gt=0, le=1)


class Outer(Strict):
    name: str
    inner: Inner
    named: dict[str, Inner] = {}


def faults(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse(read_text(text, "f.yaml"), Outer)
    return [str(fault) for fault in caught.value.faults]


def test_a_good_file_becomes_its_model() -> None:
    model = parse(read_text("name: a\ninner: {levels: [1, 2]}\n", "f.yaml"), Outer)
    assert model == Outer(name="a", inner=Inner(levels=(1, 2)))


def test_every_fault_is_reported_at_once_with_its_line_and_column() -> None:
    text = 'name: 3.12\ninner:\n  levels: []\n  mod: open\n  share: 2\nnamed:\n  x: {levels: [1, "2"]}\n'
    assert faults(text) == [
        'f.yaml:1:1: `name`: must be a valid string, got `3.12` (put it in quotes: "3.12")',
        "f.yaml:3:3: `inner.levels`: must not be empty",
        "f.yaml:4:3: unknown key `inner.mod` (did you mean `mode`?)",
        "f.yaml:5:3: `inner.share`: must be at most 1, got `2`",
        'f.yaml:7:19: `named.x.levels[1]`: must be a valid integer, got `"2"`',
    ]


def test_a_wrong_choice_suggests_the_nearest() -> None:
    assert faults("name: a\ninner: {levels: [1], mode: closd}\n") == [
        "f.yaml:2:22: `inner.mode`: must be 'open' or 'closed', got `\"closd\"` (did you mean `closed`?)"
    ]


def test_a_missing_key_is_reported_where_it_should_stand() -> None:
    missing = ["f.yaml:1:1: `inner.levels` is missing", "f.yaml:1:1: `name` is missing"]
    assert sorted(faults("inner:\n  mode: open\n")) == missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", 'f.yaml:2:1: found duplicate key "a"'),
        ("a: [1\nb: 2\n", "f.yaml:2:2: not valid YAML: expected ',' or ']'"),
        ("", "f.yaml:1:1: a mapping was expected at the top, the file is empty"),
        ("- 1\n", "f.yaml:1:1: a mapping was expected at the top, the file is a list"),
        ("a: .nan\n", "f.yaml:1:1: a finite number was expected, got nan"),
        ("1: a\n", "f.yaml:1:1: keys are text, got `1`"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_text(text, "f.yaml")
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_there_or_not_text_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        read(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read(tmp_path / "binary.yaml")


def test_merging_replaces_and_deletes_and_remembers_where_each_value_was_written() -> None:
    base = read_text("name: a\ninner:\n  levels: [1]\n  mode: open\n", "base.yaml")
    over = read_text("inner:\n  mode: null\n  levels: [2, 3]\n", "over.yaml")
    merged = merge(base, over)
    assert merged.data == {"name": "a", "inner": {"levels": [2, 3]}}
    assert str(merged.locate(("name",))) == "base.yaml:1:1"
    assert str(merged.locate(("inner", "levels", 1))) == "over.yaml:3:15"


def test_a_fault_in_an_inherited_value_names_the_line_it_was_written_on() -> None:
    base = read_text("name: a\ninner:\n  levels: [1]\n  share: 7\n", "base.yaml")
    merged = merge(base, read_text("inner: {mode: open}\n", "over.yaml"))
    with pytest.raises(InputError, match=r"base\.yaml:4:3: `inner\.share`: must be at most 1"):
        parse(merged, Outer)


def test_dates_and_versions_stay_text() -> None:
    assert read_text("day: 2026-11-29\narch: 12.0a\nanswer: yes\n", "f.yaml").data == {
        "day": "2026-11-29",
        "arch": "12.0a",
        "answer": "yes",
    }


def test_some_bytes_of_aliases_do_not_write_out_to_a_mountain() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]  # 9 ** 12 values
    with pytest.raises(InputError, match=r"`f.yaml` holds more than \d+ values, with its aliases written out"):
        read_text("\n".join(lines), "f.yaml")
    with pytest.raises(InputError):
        read_text("\n".join(lines[:5]), "f.yaml")  # 9 ** 5 = 59049


@pytest.mark.parametrize("text", ["a: &a {<<: *a, b: 1}\n", "a: &a {<<: [*a], b: 1}\n"])
def test_an_alias_of_what_it_stands_in_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match=r"`f\.yaml` is not valid YAML: an alias stands in what it names"):
        read_text(text, "f.yaml")


def test_aliases_as_people_use_them_are_read() -> None:
    assert read_text("a: &a {x: [1, 2]}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n", "f.yaml").data == {
        "a": {"x": [1, 2]},
        "b": {"x": [1, 2], "y": 3},
        "c": [{"x": [1, 2]}, {"x": [1, 2]}],
    }


def test_a_file_as_long_as_people_write_them_is_read() -> None:
    assert len(read_text("a: [" + "1," * 11_000 + "]\n", "f.yaml").data["a"]) == 11_000


def test_of_very_many_faults_the_first_fifty_are_told() -> None:
    text = "name: a\ninner: {levels: [1]}\n" + "".join(f"extra{n:03}: 1\n" for n in range(191))
    with pytest.raises(InputError) as caught:
        parse(read_text(text, "f.yaml"), Outer)
    told = str(caught.value).splitlines()
    assert told[0] == "191 faults"
    assert [line[:11] for line in told[1:51]] == [f"  f.yaml:{n}:"[:11] for n in range(3, 53)]
    assert told[51:] == ["  and 141 more"]
    assert len(caught.value.faults) == 191
