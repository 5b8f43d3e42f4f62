"""Atomic writes, digests, appended lines."""

import hashlib
import os
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.files import append_line, canonical_json, digest, read_json, read_json_lines, sha256_file, write_atomic


def test_equal_values_have_equal_digests_whatever_their_order() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "ü"]}) == '{"a":[1.5,"ü"],"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


def test_a_write_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    write_atomic(path, "one")
    write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["file.json"]


def test_a_write_that_cannot_be_done_says_so_and_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "blocker").write_text("a file where a folder should be")
    with pytest.raises(InputError, match="cannot write"):
        write_atomic(tmp_path / "blocker" / "x", "text")
    assert (tmp_path / "blocker").read_text() == "a file where a folder should be"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, '{"a":1}')
    append_line(path, '{"a":2}', sync=True)
    with path.open("ab") as stream:
        stream.write(b'{"a":')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":')
    append_line(path, '{"a":2}')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


def test_a_line_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"cannot write `.*lines\.jsonl`: No space left on device"):
        append_line(tmp_path / "lines.jsonl", "{}")


def test_a_file_is_digested_in_blocks(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_what_is_not_json_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json(tmp_path / "f.json")
