"""`harness fetch` and `harness build`: whole commands, real wheels, a real index on the loopback."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fakes.binaries import library
from fakes.packages import make_sdist, make_wheel
from fakes.projects import Project, project

from harness.env import fetch as fetching
from harness.env import overlay as overlays

BUILD = [sys.executable, "-m", "harness", "build", "demo", "--offline"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        yield made


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    return tmp_path / "home" / "wheelhouse"


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    return tmp_path / "home" / "envs"


def demo(here: Project, text: str = "", **details: Any) -> Path:
    """A locked spec `demo` of one package; returns the package's wheel."""
    wheel = here.wheel("server", "1.2", **details)
    here.spec("demo", f"packages: [server==1.2]\n{text}")
    assert here.run("lock", "demo").code == 0
    return wheel


def python(answer: dict[str, Any], code: str) -> str:
    """What the built environment's interpreter prints."""
    return subprocess.run(
        [answer["python"], "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_fetch_fills_the_wheelhouse_with_exactly_the_locked_bytes(here: Project, wheelhouse: Path) -> None:
    wheel = demo(here)

    said = here.run("fetch", "demo", "--json")

    assert said.code == 0
    assert (said.json["files"], said.json["bytes"]) == (1, wheel.stat().st_size)
    assert (wheelhouse / wheel.name).read_bytes() == wheel.read_bytes()
    assert [path.name for path in wheelhouse.glob("*.whl")] == [wheel.name]


def test_a_second_fetch_downloads_nothing(here: Project) -> None:
    demo(here)
    here.run("fetch", "demo")
    here.index.asked.clear()

    assert here.run("fetch", "demo").code == 0
    assert here.index.asked == []


def test_a_broken_download_goes_on_where_it_stopped(here: Project, wheelhouse: Path) -> None:
    wheel = demo(
        here, contents={"server/data.txt": "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(200))}
    )
    here.index.cut[wheel.name] = 1000

    assert here.run("fetch", "demo").code == 0

    assert [asked for path, asked in here.index.asked if path.endswith(".whl")] == [None, "bytes=1000-"]
    assert (wheelhouse / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_file_with_another_sha256_is_removed_and_named(here: Project, wheelhouse: Path) -> None:
    wheel = demo(here)
    data = wheel.read_bytes()
    here.index.other[wheel.name] = data[:-1] + bytes([data[-1] ^ 1])

    said = here.run("fetch", "demo")

    assert said.code == 4
    assert said.err.splitlines()[-3].startswith(f"error: `{wheel.name}` from the index `default` has sha256 ")
    assert said.err.splitlines()[-3].endswith("; removed")
    assert "hint: the index serves another file than the one locked" in said.err
    assert [path for path in wheelhouse.rglob("*") if path.suffix == ".whl"] == []


def test_every_file_that_cannot_be_had_is_named(here: Project) -> None:
    wheels = [here.wheel(name, "1.0") for name in ("one", "two", "three")]
    here.spec("demo", "packages: [one, two, three]\n")
    here.run("lock", "demo")
    for wheel in wheels[:2]:
        wheel.unlink()

    said = here.run("fetch", "demo")

    assert said.code == 4
    assert "error: 2 files could not be fetched" in said.err
    assert "`one`" in said.err
    assert "`two`" in said.err
    assert "`three`" not in said.err


def test_a_nightly_that_left_its_index_still_builds_from_the_wheelhouse(here: Project, tmp_path: Path) -> None:
    nightly = make_wheel(tmp_path / "nightly", "torch", "2.16.0.dev20261115+cu130")
    index = f"indexes: {{nightly: '{nightly.parent}'}}\n"
    here.spec("demo", index + "packages: [{name: torch, version: 2.16.0.dev20261115+cu130, index: nightly}]\n")
    here.run("lock", "demo")
    here.run("fetch", "demo")
    nightly.unlink()

    gone = here.run("fetch", "demo", "--wheelhouse", str(tmp_path / "empty"))
    assert gone.code == 4
    assert f"the index `nightly` no longer has `{nightly.name}`" in gone.err
    assert "nightly builds leave their index" in gone.err

    said = here.run("build", "demo", "--offline", "--json")
    assert said.code == 0
    assert python(said.json, "import torch; print(torch.__version__)") == "2.16.0.dev20261115+cu130"


def test_a_wheel_folder_of_this_machine_serves_a_locked_file(
    here: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = demo(here)
    (tmp_path / "links").mkdir()
    wheel.rename(tmp_path / "links" / wheel.name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))

    assert here.run("fetch", "demo").code == 0


def test_a_full_disk_is_told_before_the_first_byte(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    demo(here)
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("harness.env.fetch.shutil.disk_usage", lambda _: usage)

    said = here.run("fetch", "demo")

    assert said.code == 4
    assert "not enough room for the wheelhouse" in said.err
    assert "1 MiB free" in said.err
    assert here.index.files_asked() == []


def test_a_disk_that_fills_up_leaves_no_half_file(
    here: Project, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = demo(here)

    def full(_blocks: object, target: Any, _work: object) -> NoReturn:
        target.write(wheel.read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetching, "_copy", full)
    said = here.run("fetch", "demo")

    assert said.code == 4
    assert "No space left on device" in said.err
    assert "hint: free some space, or set `$HARNESS_HOME` to a larger disk" in said.err
    assert list(wheelhouse.rglob("*.whl")) == []


@pytest.mark.parametrize("verb", ["fetch", "build"])
def test_a_target_that_cannot_be_written_is_a_message(verb: str, here: Project, tmp_path: Path) -> None:
    demo(here)
    (tmp_path / "home").write_text("a file where the folder should be")

    said = here.run(verb, "demo")

    assert said.code == 4
    assert said.err.splitlines()[-1].startswith("error: cannot ")
    assert "Not a directory" in said.err or "File exists" in said.err


def test_build_installs_what_the_lock_names_and_says_where(here: Project, environments: Path) -> None:
    demo(here, "variables: {MODE: fast}\n")

    said = here.run("build", "demo", "--json")

    assert said.code == 0
    answer = said.json
    env_id = answer["env_id"]
    assert Path(answer["path"]) == environments / env_id[:16]
    assert python(answer, "import server; print(server.__version__)") == "1.2"
    made = json.loads((environments / env_id[:16] / "harness" / "manifest.json").read_text())
    assert (made["env_id"], made["env"], made["packages"]) == (env_id, "demo", {"server": "1.2"})


def test_jit_compilers_keep_their_work_in_a_folder_of_the_env_id(here: Project, tmp_path: Path) -> None:
    demo(here, "variables: {MODE: fast}\n")
    answer = here.run("build", "demo", "--json").json

    variables = answer["variables"]
    cache = tmp_path / "home" / "cache" / answer["env_id"][:16]
    for name in (
        "FLASHINFER_WORKSPACE_BASE",
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TVM_FFI_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):
        assert Path(variables[name]).parent == cache
    assert variables["MODE"] == "fast"
    assert len(set(variables.values())) == len(variables)


def test_a_second_build_changes_nothing_and_says_so(here: Project, environments: Path) -> None:
    demo(here)
    first = here.run("build", "demo", "--json").json
    manifest = environments / first["env_id"][:16] / "harness" / "manifest.json"
    before = manifest.stat().st_mtime_ns

    said = here.run("build", "demo", "--json")

    assert (said.json["reused"], said.err) == (True, "built before, nothing to do\n")
    assert manifest.stat().st_mtime_ns == before


def test_a_build_names_the_libraries_that_the_machine_lacks(here: Project, tmp_path: Path) -> None:
    nowhere = library(tmp_path / "libnowhere.so.7")
    extension = library(tmp_path / "extension.so", needs=[nowhere]).read_bytes()
    demo(here, contents={"server/extension.so": extension})

    said = [here.run("build", "demo", "--json") for _ in range(2)]

    for answer in said:
        assert answer.json["lacking"] == ["libnowhere.so.7"]
        assert "warning: this machine lacks `libnowhere.so.7`; what needs it will not load" in answer.err


def test_an_environment_is_cut_off_from_every_cache_it_came_from(here: Project, environments: Path) -> None:
    demo(here)
    answer = here.run("build", "demo", "--json").json

    installed = [path for path in Path(answer["path"]).rglob("site-packages/server*/**/*") if path.is_file()]
    assert installed
    assert {path.stat().st_nlink for path in installed} == {1}
    assert [path.name for path in environments.iterdir() if not path.name.endswith(".lock")] == [answer["env_id"][:16]]


def test_a_truncated_wheel_stops_an_offline_build_is_named_and_is_removed(
    here: Project, wheelhouse: Path, environments: Path
) -> None:
    wheel = demo(here)
    here.run("fetch", "demo")
    os.truncate(wheelhouse / wheel.name, 100)

    said = here.run("build", "demo", "--offline")

    assert said.code == 4
    size = wheel.stat().st_size
    assert f"`{wheel.name}` has 100 bytes, the lock says {size}; removed" in said.err
    assert "hint: run `harness fetch demo` where the indexes can be reached" in said.err
    assert not (wheelhouse / wheel.name).exists()
    assert [path for path in environments.iterdir() if not path.name.startswith(".")] == []


def test_a_build_that_is_killed_is_never_taken_for_a_whole_one(here: Project, environments: Path) -> None:
    demo(here, contents={f"server/part{number}.py": f"n = {number}\n" for number in range(4000)})
    here.run("fetch", "demo")
    process = subprocess.Popen(BUILD, cwd=here.root, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(environments.glob("*/bin/python")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (left,) = environments.glob("*/bin/python")
    assert not (left.parents[1] / "harness" / "manifest.json").exists()

    said = here.run("build", "demo", "--offline", "--json")

    assert said.code == 0
    assert said.json["reused"] is False
    assert python(said.json, "import server.part3999 as last; print(last.n)") == "3999"
    assert [path.name for path in environments.iterdir() if not path.name.endswith(".lock")] == [left.parents[1].name]


def test_an_interrupted_build_leaves_nothing(
    here: Project, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here.root / "envspecs" / "overlays" / "shim"
    folder.mkdir(parents=True)
    (folder / "overlay.yaml").write_text("distribution: vision\nversion: '1'\nwhy: a test\n")
    demo(here, "overlays: [shim]\n")

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(overlays, "install", interrupted)
    said = here.run("build", "demo")

    assert said.code == 130
    assert [path for path in environments.iterdir() if not path.name.startswith(".")] == []


def test_two_builds_at_once_both_end_with_the_same_whole_environment(here: Project) -> None:
    demo(here, contents={f"server/part{number}.py": f"n = {number}\n" for number in range(500)})
    here.run("fetch", "demo")

    both = [
        subprocess.Popen([*BUILD, "--json"], cwd=here.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate() for process in both]

    assert [process.returncode for process in both] == [0, 0], answers
    paths = {json.loads(out)["path"] for out, _ in answers}
    assert len(paths) == 1
    assert python(json.loads(answers[0][0]), "import server.part499 as last; print(last.n)") == "499"


def test_a_stale_lock_is_not_built(here: Project) -> None:
    demo(here)
    here.spec("demo", "packages: [server==1.3]\n")

    said = here.run("build", "demo")

    assert said.code == 3
    assert "package server: server==1.2 -> server==1.3" in said.err
    assert "hint: run `harness lock demo`" in said.err


def test_an_unknown_spec_gets_a_suggestion(here: Project) -> None:
    demo(here)
    for verb in ("lock", "fetch", "build"):
        said = here.run(verb, "dmeo")
        assert (said.code, said.err.splitlines()[-1]) == (2, "hint: did you mean `demo`?")


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("glibc: '2.99'", "this environment needs glibc 2.99 or newer, this machine has glibc 2."),
        ("arch: aarch64" if os.uname().machine == "x86_64" else "arch: x86_64", "this environment is for "),
    ],
)
def test_a_machine_the_lock_is_not_for_can_lock_and_cannot_build(platform: str, message: str, here: Project) -> None:
    demo(here, f"platform: {{{platform}}}\n")

    said = here.run("build", "demo")

    assert said.code == 4
    assert message in said.err
    assert "hint: locking works anywhere; build on such a machine" in said.err


def test_another_system_than_linux_is_refused_in_a_build(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    demo(here)
    monkeypatch.setattr("harness.env.interpreter.sys.platform", "darwin")
    said = here.run("build", "demo")
    monkeypatch.undo()

    assert said.code == 4
    assert "error: this environment is for linux, this machine runs darwin" in said.err


def test_a_python_the_lock_does_not_cover_is_refused(here: Project) -> None:
    here.wheel("server", "1.2")
    here.spec("demo", 'python: "3.19"\npackages: [server==1.2]\n')
    here.run("lock", "demo")

    said = here.run("build", "demo")
    assert said.code == 4
    assert "no Python 3.19 on this machine, which `demo` needs" in said.err

    said = here.run("build", "demo", "--python", sys.executable)
    assert said.code == 4
    assert "`demo` is locked for 3.19" in said.err


def test_an_overlay_is_a_distribution_that_says_it_is_ours(here: Project) -> None:
    folder = here.root / "envspecs" / "overlays" / "standin"
    (folder / "vision").mkdir(parents=True)
    (folder / "overlay.yaml").write_text("distribution: vision\nversion: 0.28.0\nwhy: no build for CPUs\n")
    (folder / "vision" / "__init__.py").write_text("size = 224\n")
    demo(here, "overlays: [standin]\n")

    answer = here.run("build", "demo", "--json").json

    code = (
        "import vision, importlib.metadata as m; d = m.distribution('vision');"
        "print(vision.size, d.version, d.read_text('INSTALLER').strip(), d.metadata['Summary'], len(d.files))"
    )
    assert python(answer, code) == "224 0.28.0 harness no build for CPUs 4"


def test_an_overlay_may_not_replace_a_packages_file(here: Project, environments: Path) -> None:
    folder = here.root / "envspecs" / "overlays" / "standin"
    (folder / "server").mkdir(parents=True)
    (folder / "overlay.yaml").write_text("distribution: vision\nversion: 0.28.0\nwhy: no build for CPUs\n")
    (folder / "server" / "__init__.py").write_text("")
    demo(here, "overlays: [standin]\n")

    said = here.run("build", "demo")

    assert said.code == 4
    assert "overlay `standin` would replace files that a package owns\n  server/__init__.py" in said.err
    assert [path for path in environments.iterdir() if not path.name.startswith(".")] == []


def test_a_source_distribution_is_refused_until_the_spec_allows_it(here: Project) -> None:
    make_sdist(here.index.folder, "tool", "1.0")
    here.spec("demo", "packages: [{name: tool, version: '1.0'}]\n")
    said = here.run("lock", "demo")
    assert said.code == 2
    assert "tool==1.0 has no usable wheels" in said.err
    assert "hint: choose a version that has a wheel, or allow `sdist: true`" in said.err

    here.spec("demo", "packages: [{name: tool, version: '1.0', sdist: true, dependencies: []}]\n")
    assert here.run("lock", "demo").code == 0
    answer = here.run("build", "demo", "--json").json
    assert python(answer, "import tool; print(tool.built)") == "True"


def test_a_drifted_environment_is_built_anew_and_the_reason_is_said(here: Project) -> None:
    demo(here)
    answer = here.run("build", "demo", "--json").json
    (installed,) = Path(answer["path"]).rglob("site-packages/server/__init__.py")
    was = installed.stat().st_size
    installed.write_text("__version__ = 'by hand'\n")

    said = here.run("build", "demo", "--json")

    assert said.json["reused"] is False
    assert (
        f"built before, but not as it should be (file `server/__init__.py`: locked {was} bytes as built, "
        "live 24 bytes, edited since); building it anew"
    ) in said.err.splitlines()
    assert python(said.json, "import server; print(server.__version__)") == "1.2"


def test_an_interrupted_fetch_leaves_no_wheel_and_the_next_one_goes_on(here: Project, wheelhouse: Path) -> None:
    noise = "".join(hashlib.sha256(bytes([number % 256, number // 256])).hexdigest() for number in range(4000))
    wheel = demo(here, contents={"server/data.txt": noise})
    here.index.pause_s = 0.1
    command = [sys.executable, "-m", "harness", "fetch", "demo"]
    process = subprocess.Popen(command, cwd=here.root, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(path.stat().st_size for path in wheelhouse.glob(".partial/*")):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in err
    assert list(wheelhouse.glob("*.whl")) == []

    here.index.pause_s = 0.0
    assert here.run("fetch", "demo").code == 0
    assert str(here.index.asked[-1][1]).startswith("bytes=")
    assert (wheelhouse / wheel.name).read_bytes() == wheel.read_bytes()
