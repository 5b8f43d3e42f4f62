"""`harness lock`: whole commands against a real package index on the loopback."""

import hashlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.packages import PackageIndex, make_wheel, served
from fakes.projects import Project, project


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        yield made


def locked(here: Project, name: str) -> dict[str, dict[str, object]]:
    """A lock's packages by name, read without our own code."""
    return {package["name"]: package for package in tomllib.loads(here.lock(name).read_text())["packages"]}


def test_a_spec_becomes_a_lock_of_every_artefact_with_sha256_and_size(here: Project) -> None:
    wheel = here.wheel("server", "1.2", requires=["parser>=1"])
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [server==1.2]\n")

    said = here.run("lock", "demo", "--json")

    assert (said.code, said.err) == (0, "")
    assert [answer["packages"] for answer in said.json] == [2]
    server = locked(here, "demo")["server"]
    assert server["files"] == [
        {
            "file": wheel.name,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "size": wheel.stat().st_size,
        }
    ]
    assert server["requires"] == ["parser"]


def test_locking_downloads_no_wheel_and_names_no_host(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser>=1"])
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [server==1.2]\n")

    assert here.run("lock", "demo").code == 0

    assert here.index.files_asked() == []
    text = here.lock("demo").read_text()
    assert "127.0.0.1" not in text
    assert "http" not in text


def test_the_same_inputs_give_the_same_bytes(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser>=1"])
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [server==1.2]\nvariables: {B: one, A: two}\n")
    here.run("lock", "demo")
    first = here.lock("demo").read_bytes()
    here.lock("demo").unlink()

    here.run("lock", "demo")

    assert here.lock("demo").read_bytes() == first


def test_pins_that_still_fit_stay_when_newer_versions_appear_and_the_spec_changes(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser>=1"])
    here.wheel("parser", "1.0")
    here.wheel("extra", "1.0")
    here.spec("demo", "packages: [server>=1]\n")
    here.run("lock", "demo")
    here.wheel("parser", "1.1")
    here.wheel("server", "1.3", requires=["parser>=1"])
    here.spec("demo", "packages: [server>=1, extra==1.0]\n")

    said = here.run("lock", "demo")

    assert said.code == 0
    versions = {name: package["version"] for name, package in locked(here, "demo").items()}
    assert versions == {"server": "1.2", "parser": "1.0", "extra": "1.0"}
    assert said.err.splitlines() == ["demo: package extra added: extra==1.0", "demo: extra 1.0 is new"]


def test_upgrade_moves_only_the_package_named(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser>=1"])
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [server>=1]\n")
    here.run("lock", "demo")
    here.wheel("parser", "1.1")
    here.wheel("server", "1.3", requires=["parser>=1"])

    said = here.run("lock", "demo", "--upgrade", "parser")

    assert said.err.splitlines() == ["demo: parser 1.0 -> 1.1"]
    assert locked(here, "demo")["server"]["version"] == "1.2"
    assert here.run("lock", "demo", "--upgrade-all").err.splitlines() == ["demo: server 1.2 -> 1.3"]


def test_upgrade_of_a_package_that_is_not_there_suggests_the_nearest(here: Project) -> None:
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [parser>=1]\n")
    here.run("lock", "demo")

    said = here.run("lock", "demo", "--upgrade", "praser")

    assert said.code == 2
    assert said.err == ("error: `--upgrade praser`: the lock holds no such package\n\nhint: did you mean `parser`?\n")


def test_check_passes_on_a_current_lock_without_asking_the_index(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\n")
    here.run("lock", "demo")
    here.index.asked.clear()

    said = here.run("lock", "--check")

    assert (said.code, said.out) == (0, "demo: the lock is current\n")
    assert here.index.asked == []


def test_check_names_what_differs_and_the_command_to_run(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\ncuda: {toolkit: 13.0.1, arch: [sm_120a], driver: '>=580'}\n")
    here.run("lock", "demo")
    before = here.lock("demo").read_bytes()
    here.spec("demo", "packages: [server==1.3]\ncuda: {toolkit: 13.0.2, arch: [sm_120a], driver: '>=580'}\n")

    said = here.run("lock", "demo", "--check")

    assert said.code == 3
    assert said.err == (
        "error: stale: the lock of `demo`\n"
        "  demo: cuda.toolkit: 13.0.1 -> 13.0.2\n"
        "  demo: package server: server==1.2 -> server==1.3\n"
        "\nhint: run `harness lock demo`\n"
    )
    assert here.lock("demo").read_bytes() == before


def test_a_missing_lock_is_named_with_the_command_that_makes_it(here: Project) -> None:
    here.spec("demo", "packages: [server==1.2]\n")

    for verb in (["lock", "--check", "demo"], ["build", "demo"], ["fetch", "demo"]):
        said = here.run(*verb)
        assert said.code == 3
        assert said.err == f"error: there is no lock `{here.lock('demo')}`\n\nhint: run `harness lock demo`\n"


def test_a_lock_edited_by_hand_is_refused(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\n")
    here.run("lock", "demo")
    text = here.lock("demo").read_text()
    here.lock("demo").write_text(text.replace('version = "1.2"\nfiles', 'version = "1.3"\nfiles'))

    said = here.run("lock", "--check", "demo")

    assert said.code == 3
    assert "was changed by hand: its contents do not give its `env_id`" in said.err


def test_conflicting_pins_keep_uvs_explanation(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser<2"])
    here.wheel("parser", "2.0")
    here.spec("demo", "packages: [server==1.2, parser==2.0]\n")

    said = here.run("lock", "demo")

    assert said.code == 2
    assert said.err.startswith("error: `demo` cannot be locked: its packages do not go together\n")
    assert "server depend on parser<2 and the spec depends on parser==2.0" in said.err
    assert "hint: change the pins in the spec so that they can be had together" in said.err
    assert not here.lock("demo").exists()


def test_a_package_no_index_has_is_named(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [sevrer==1.2]\n")

    said = here.run("lock", "demo")

    assert said.code == 2
    assert "sevrer was not found in the package registry" in said.err


def test_an_index_that_cannot_be_reached_is_named(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    here.wheel("server", "1.2")
    here.spec(
        "demo",
        "indexes: {kernels: 'http://127.0.0.1:9/simple'}\n"
        "packages: [server==1.2, {name: kernel, version: 1.0, index: kernels}]\n".replace("1.0", '"1.0"'),
    )

    said = here.run("lock", "demo")

    assert said.code == 2
    assert said.err.startswith("error: `demo` cannot be locked: the index `kernels` cannot be reached\n")
    assert "hint: check the network, or set `HARNESS_INDEX_KERNELS` to a mirror of it" in said.err

    make_wheel(here.root / "mirror", "kernel", "1.0")
    monkeypatch.setenv("HARNESS_INDEX_KERNELS", str(here.root / "mirror"))
    assert here.run("lock", "demo").code == 0
    assert locked(here, "demo")["kernel"]["index"] == "kernels"


def test_the_site_file_says_where_an_index_is_on_this_machine(here: Project, tmp_path: Path) -> None:
    make_wheel(tmp_path / "mirror", "kernel", "1.0+cu130")
    here.spec(
        "demo",
        "indexes: {kernels: 'http://127.0.0.1:9/simple'}\n"
        "packages: [{name: kernel, version: 1.0+cu130, index: kernels}]\n",
    )
    site = tmp_path / "user" / "config" / "harness" / "indexes.toml"
    site.parent.mkdir(parents=True)
    site.write_text(f'[indexes]\nkernels = "{tmp_path / "mirror"}"\n')

    assert here.run("lock", "demo").code == 0
    assert locked(here, "demo")["kernel"]["version"] == "1.0+cu130"


def test_artefacts_without_sha256_are_refused_all_of_them_by_name(here: Project) -> None:
    here.wheel("server", "1.2", requires=["parser"])
    here.wheel("parser", "1.0")
    here.index.hashes = False
    here.spec("demo", "packages: [server==1.2]\n")

    said = here.run("lock", "demo")

    assert said.code == 3
    assert said.err.splitlines()[:3] == [
        "error: `demo` cannot be locked: 2 packages lack what a lock needs",
        "  `parser` 1.0: `parser-1.0-py3-none-any.whl` has no sha256 at its index",
        "  `server` 1.2: `server-1.2-py3-none-any.whl` has no sha256 at its index",
    ]
    assert not here.lock("demo").exists()


def test_a_size_the_index_leaves_out_is_asked_of_the_file(here: Project) -> None:
    wheel = here.wheel("server", "1.2")
    here.index.html = True
    here.spec("demo", "packages: [server==1.2]\n")

    assert here.run("lock", "demo").code == 0
    assert locked(here, "demo")["server"]["files"][0]["size"] == wheel.stat().st_size  # type: ignore[index]


def test_only_the_wheel_a_platform_takes_is_locked(here: Project) -> None:
    for tag in (
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp312-cp312-manylinux_2_40_x86_64",  # a newer glibc than the spec's
        "cp312-cp312-manylinux_2_28_aarch64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "py3-none-any",  # fits, but less closely
    ):
        here.wheel("kernel", "1.0", tag=tag)
    here.spec("demo", 'python: "3.12"\nplatform: {glibc: "2.39"}\npackages: ["kernel==1.0"]\n')

    assert here.run("lock", "demo").code == 0
    files = locked(here, "demo")["kernel"]["files"]
    assert [file["file"] for file in files] == ["kernel-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"]  # type: ignore[union-attr]


def test_a_range_of_pythons_locks_a_file_for_each(here: Project) -> None:
    for minor in (11, 12):
        here.wheel(
            "kernel", "1.0", tag=f"cp3{minor}-cp3{minor}-manylinux_2_17_x86_64", requires=["old; python_version<'3.12'"]
        )
    here.wheel("old", "1.0")
    here.spec("demo", 'python: ">=3.11,<3.13"\npackages: ["kernel==1.0"]\n')

    assert here.run("lock", "demo").code == 0
    packages = locked(here, "demo")
    assert [(file["file"], file["pythons"]) for file in packages["kernel"]["files"]] == [  # type: ignore[union-attr]
        ("kernel-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", ["3.11"]),
        ("kernel-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", ["3.12"]),
    ]
    assert packages["old"]["pythons"] == ["3.11"]


def test_a_package_without_a_wheel_for_the_platform_is_refused(here: Project) -> None:
    here.wheel("kernel", "1.0", tag="cp312-cp312-manylinux_2_40_x86_64")
    here.spec("demo", 'python: "3.12"\nplatform: {glibc: "2.39"}\npackages: ["kernel==1.0"]\n')

    said = here.run("lock", "demo")

    assert said.code == 3
    assert "`kernel` 1.0 has no wheel for Python 3.12 on linux x86_64 with glibc 2.39" in said.err


def test_a_folder_of_wheels_and_an_index_give_the_same_lock(
    here: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.wheel("server", "1.2", requires=["torch"])
    with served(PackageIndex(tmp_path / "public")) as public:
        make_wheel(public.folder, "torch", "2.13.0+cpu")
        here.spec(
            "demo",
            f"indexes: {{torch-cpu: '{public.address}'}}\n"
            "packages: [server==1.2, {name: torch, version: 2.13.0+cpu, index: torch-cpu}]\n",
        )
        assert here.run("lock", "demo").code == 0
        from_index = here.lock("demo").read_bytes()
        public.asked.clear()
        here.lock("demo").unlink()

        monkeypatch.setenv("PIP_FIND_LINKS", str(public.folder))
        assert here.run("lock", "demo").code == 0
        assert public.asked == []
    assert here.lock("demo").read_bytes() == from_index


def test_a_folder_of_wheels_stands_in_only_if_it_serves_every_python(
    here: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    make_wheel(tmp_path / "links", "torch", "2.13.0+cpu", tag="cp311-cp311-manylinux_2_28_x86_64")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    with served(PackageIndex(tmp_path / "public")) as public:
        for python in ("cp311", "cp312"):
            make_wheel(public.folder, "torch", "2.13.0+cpu", tag=f"{python}-{python}-manylinux_2_28_x86_64")
        head = f"indexes: {{torch-cpu: '{public.address}'}}\n"
        packages = "packages: [{name: torch, version: 2.13.0+cpu, index: torch-cpu}]\n"
        here.spec("old", f'python: "3.11"\n{head}{packages}')
        here.spec("both", f'python: ">=3.11,<3.13"\n{head}{packages}')

        assert here.run("lock", "old").code == 0
        assert public.asked == []
        assert here.run("lock", "both").code == 0
        assert len(locked(here, "both")["torch"]["files"]) == 2  # type: ignore[arg-type]


def test_dependencies_in_the_spec_replace_what_a_package_asks_for(here: Project) -> None:
    here.wheel("model", "1.0", requires=["plugin-host>=3"])
    here.wheel("server", "1.2", requires=["vision", "parser"])
    here.wheel("parser", "1.0")
    here.spec("demo", "packages: [{name: model, version: '1.0', dependencies: []}, server==1.2]\nexclude: [vision]\n")

    assert here.run("lock", "demo").code == 0
    assert sorted(locked(here, "demo")) == ["model", "parser", "server"]


def test_an_override_replaces_a_pin_a_package_makes(here: Project, tmp_path: Path) -> None:
    make_wheel(tmp_path / "nightly", "torch", "2.16.0.dev20261115+cu130")
    here.wheel("server", "1.2", requires=["torch==2.14.1"])
    here.spec(
        "demo",
        f"indexes: {{nightly: '{tmp_path / 'nightly'}'}}\n"
        "packages: [server==1.2, {name: torch, version: 2.16.0.dev20261115+cu130, index: nightly}]\n"
        "overrides: [torch==2.16.0.dev20261115+cu130]\n",
    )

    assert here.run("lock", "demo").code == 0
    torch = locked(here, "demo")["torch"]
    assert (torch["version"], torch["index"]) == ("2.16.0.dev20261115+cu130", "nightly")


def test_two_locks_are_compared_in_words(here: Project) -> None:
    for version in ("1.2", "1.3"):
        here.wheel("server", version, requires=["parser"] if version == "1.2" else ["reader"])
    here.wheel("parser", "1.0")
    here.wheel("reader", "2.0")
    cuda = "cuda: {{toolkit: {}, arch: [sm_120a], driver: '>=580'}}\n"
    here.spec("old", "packages: [server==1.2]\n" + cuda.format("12.8.1"))
    here.spec("new", "packages: [server==1.3]\n" + cuda.format("13.0.1"))
    here.run("lock", "old", "new")

    said = here.run("lock", "--diff", "old", "new")

    assert said.code == 0
    assert said.out.splitlines() == [
        "cuda.toolkit: 12.8.1 -> 13.0.1",
        "env: old -> new",
        "package server: server==1.2 -> server==1.3",
        "parser 1.0 is gone",
        "reader 2.0 is new",
        "server 1.2 -> 1.3",
    ]


def test_an_overlays_bytes_are_part_of_the_lock(here: Project) -> None:
    here.wheel("server", "1.2")
    overlay = here.root / "envspecs" / "overlays" / "standin"
    (overlay / "vision").mkdir(parents=True)
    (overlay / "overlay.yaml").write_text("distribution: vision\nversion: 0.28.0\nwhy: no build for CPUs\n")
    (overlay / "vision" / "__init__.py").write_text("")
    here.spec("demo", "packages: [server==1.2]\noverlays: [standin]\n")
    here.run("lock", "demo")

    (overlay / "vision" / "__init__.py").write_text("changed = True\n")
    said = here.run("lock", "--check", "demo")

    assert said.code == 3
    assert "demo: overlay `standin` has other contents" in said.err


def test_an_unwritable_target_is_a_message(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\n")
    (here.root / "envspecs" / "locks").write_text("a file where the folder should be")

    said = here.run("lock", "demo")

    assert said.code == 2
    assert said.err.startswith(f"error: cannot write `{here.lock('demo')}`: ")


def test_a_default_index_that_cannot_be_reached_is_named_and_a_mirror_of_it_serves(
    here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", "packages: [server==1.2]\n")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://user:secret@127.0.0.1:9/simple")

    said = here.run("lock", "demo")
    assert said.code == 2
    assert said.err.startswith("error: `demo` cannot be locked: the index `default` cannot be reached\n")
    assert said.err.endswith("\nhint: check the network, or set `HARNESS_INDEX_DEFAULT` to a mirror of it\n")
    assert "secret" not in said.err

    monkeypatch.setenv("HARNESS_INDEX_DEFAULT", here.index.address)
    assert here.run("lock", "demo").code == 0
    assert here.run("fetch", "demo").code == 0


def test_a_check_cannot_move_a_pin(here: Project) -> None:
    said = here.run("lock", "demo", "--check", "--upgrade-all")
    assert said.code == 2
    assert "`--check` changes nothing and `--upgrade` moves pins" in said.err
