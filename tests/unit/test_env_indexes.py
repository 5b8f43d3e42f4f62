"""Index names become addresses of this machine, in a stated order."""

from pathlib import Path

import pytest

from harness.env import indexes
from harness.env.indexes import Index
from harness.errors import InputError


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is configured."""
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "PIP_INDEX_URL",
        "UV_FIND_LINKS",
        "PIP_FIND_LINKS",
        "PIP_CONFIG_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "system"))


def site_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config" / "harness" / "indexes.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def pip_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[global]\n{text}\n")


def test_the_variable_beats_the_site_file_which_beats_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"pytorch-cu130": "https://example.org/whl"}
    assert indexes.locate("pytorch-cu130", spec, tmp_path).address == "https://example.org/whl"
    site_file(tmp_path, '[indexes]\npytorch-cu130 = "https://mirror.example/whl"\n')
    assert indexes.locate("pytorch-cu130", spec, tmp_path).address == "https://mirror.example/whl"
    monkeypatch.setenv("HARNESS_INDEX_PYTORCH_CU130", "/mnt/wheels")
    assert indexes.locate("pytorch-cu130", spec, tmp_path) == Index("pytorch-cu130", "/mnt/wheels")


def test_a_folder_in_the_spec_is_relative_to_the_spec(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    index = indexes.locate("own", {"own": "wheels"}, tmp_path)
    assert index.folder == tmp_path / "wheels"


def test_a_folder_with_pages_is_an_index_and_not_a_flat_folder(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    assert Index("own", tmp_path.as_uri()).folder is None


def test_an_index_that_nothing_locates_is_an_error_with_the_variable_to_set(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        indexes.locate("own", {}, tmp_path)
    assert str(caught.value) == (
        "nothing says where the index `own` is\n\nhint: name it under `indexes` in the spec, or set `HARNESS_INDEX_OWN`"
    )


def test_the_default_index_is_what_uv_then_pip_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_file(tmp_path / "system" / "pip" / "pip.conf", "index-url = https://system.example/simple")
    assert indexes.default_address() == "https://system.example/simple"
    pip_file(tmp_path / "config" / "pip" / "pip.conf", "index-url = https://user.example/simple")
    assert indexes.default_address() == "https://user.example/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    assert indexes.default_address() == "https://pip.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    assert indexes.default_address() == "https://uv.example/simple"


def test_where_nothing_is_configured_uv_says_its_own_default() -> None:
    assert indexes.default_address().startswith("https://")


def test_wheel_folders_are_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path / 'one'} {tmp_path / 'gone'} https://example.org/links")
    pip_file(tmp_path / "config" / "pip" / "pip.conf", f"find-links = {tmp_path / 'two'} {tmp_path / 'one'}")
    assert indexes.wheel_folders() == [tmp_path / "one", tmp_path / "two"]


def test_a_broken_site_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    site_file(tmp_path, "[indexes\n")
    with pytest.raises(InputError, match=r"indexes\.toml` is not valid TOML"):
        indexes.locate("own", {}, tmp_path)
