"""The guard compares a live environment with its lock: every way it may drift, on a really built one."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.projects import Project, project

from harness.env import build, guard, lock, places, spec, system_libraries
from harness.env.built import Built
from harness.env.lock import Lock

BEFORE = "limit = {9: 64}\n"
AFTER = "limit = {9: 64, 12: 64}\n"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


PATCH = f"""Description: Adds the row of capability 12.
Origin: written for this test
Applies-To: server ==1.2
Target: server/limits.py {sha256(BEFORE)} {sha256(AFTER)}
Remove-When: the table has the row
Probe: python from server.limits import limit; assert 12 in limit

--- a/server/limits.py
+++ b/server/limits.py
@@ -1 +1 @@
-{BEFORE}+{AFTER}"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        yield made


@pytest.fixture
def live(here: Project) -> tuple[Built, Lock]:
    """A built environment with a patched package and an unpatched one."""
    here.wheel("server", "1.2", requires=["parser"], contents={"server/limits.py": BEFORE})
    here.wheel("parser", "1.0")
    (here.root / "envspecs" / "patches").mkdir()
    (here.root / "envspecs" / "patches" / "sm120.patch").write_text(PATCH)
    here.spec("demo", "packages: [server==1.2]\npatches: [sm120]\n")
    said = here.run("lock", "demo")
    assert said.code == 0, said.err
    locked = lock.read_for("demo")
    return build.build(locked, spec.load(places.spec_path("demo"))), locked


def drifts(live: tuple[Built, Lock]) -> list[str]:
    return [str(drift) for drift in guard.check(*live)]


def test_a_fresh_build_has_not_drifted_and_carries_its_patches(live: tuple[Built, Lock]) -> None:
    assert drifts(live) == []
    assert (live[0].site_packages / "server" / "limits.py").read_text() == AFTER


def test_running_python_in_it_is_no_drift(live: tuple[Built, Lock]) -> None:
    subprocess.run([live[0].python, "-c", "import server.limits, parser"], check=True, env={})
    assert list(live[0].site_packages.rglob("__pycache__"))
    assert drifts(live) == []


def test_one_edited_byte_in_a_patched_file_is_named(live: tuple[Built, Lock]) -> None:
    edited = AFTER.replace("12: 64", "12: 65")
    target = live[0].site_packages / "server" / "limits.py"
    stamp = target.stat()
    target.write_text(edited)
    os.utime(target, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # size and time tell nothing here
    assert drifts(live) == [f"patched file `server/limits.py`: locked {sha256(AFTER)[:12]}, live {sha256(edited)[:12]}"]


def test_an_edited_unpatched_file_is_named(live: tuple[Built, Lock]) -> None:
    target = live[0].site_packages / "parser" / "__init__.py"
    size = target.stat().st_size
    target.write_text("# by hand\n" + target.read_text())
    assert drifts(live) == [
        f"file `parser/__init__.py`: locked {size} bytes as built, live {size + 10} bytes, edited since"
    ]


def test_a_missing_file_is_named(live: tuple[Built, Lock]) -> None:
    (live[0].site_packages / "server" / "limits.py").unlink()
    (live[0].site_packages / "parser" / "__init__.py").unlink()
    assert [line.split(":")[0] for line in drifts(live)] == [
        "patched file `server/limits.py`",
        "file `parser/__init__.py`",
    ]
    assert all(line.endswith("live nothing") for line in drifts(live))


def test_an_upgraded_an_added_and_a_removed_package_are_named(live: tuple[Built, Lock]) -> None:
    site = live[0].site_packages
    (site / "parser-1.0.dist-info").rename(site / "parser-1.1.dist-info")
    (site / "extra-3.dist-info").mkdir()
    shutil.rmtree(site / "server-1.2.dist-info")
    assert [line for line in drifts(live) if not line.startswith("file ")] == [
        "extra: locked without it, live 3",
        "parser: locked 1.0, live 1.1",
        "server: locked 1.2, live nothing",
    ]


@pytest.mark.parametrize("name", ["sitecustomize.py", "evil.pth"])
def test_a_file_that_python_runs_at_start_is_named(name: str, live: tuple[Built, Lock]) -> None:
    (live[0].site_packages / name).write_text("")
    assert drifts(live) == [f"file `{name}`: locked without it, live 0 bytes"]


def test_a_rewritten_record_is_no_drift(live: tuple[Built, Lock]) -> None:
    (live[0].site_packages / "parser-1.0.dist-info" / "RECORD").write_text("")
    assert drifts(live) == []


def test_an_environment_without_manifest_is_no_environment(live: tuple[Built, Lock]) -> None:
    (live[0].path / "harness" / "manifest.json").unlink()
    assert drifts(live) == [f"manifest: locked {live[1].env_id[:16]}, live nothing"]
    assert build.find(live[1]) is None


def test_a_removed_interpreter_is_named(live: tuple[Built, Lock]) -> None:
    live[0].python.unlink()
    assert drifts(live) == [f"interpreter: locked {live[0].python_version}, live nothing"]


def test_another_interpreter_under_the_environment_is_named(live: tuple[Built, Lock]) -> None:
    config = live[0].path / "pyvenv.cfg"
    config.write_text(config.read_text().replace(live[0].python_version, "3.99.9"))
    assert drifts(live) == [f"interpreter: locked {live[0].python_version}, live 3.99.9"]


def test_a_library_of_the_machine_that_no_longer_loads_is_named(live: tuple[Built, Lock]) -> None:
    # As if it had loaded where it was built, and another one not: only the first is drift.
    path = live[0].path / "harness" / "manifest.json"
    made = json.loads(path.read_text())
    made["system_libraries"] = {"libc.so.6": True, "libgone.so.3": True, "libnever.so.1": False}
    path.write_text(json.dumps(made))
    assert drifts(live) == ["system library `libgone.so.3`: locked loadable, live cannot be loaded"]


def test_what_an_environment_needs_of_the_machine_is_what_none_of_its_files_provides(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int shared(void) { return 1; }\n")
    provided = tmp_path / "site" / "libs" / "libinside.so.2"
    provided.parent.mkdir(parents=True)
    compiler = shutil.which("cc") or pytest.skip("no C compiler on this machine")
    build_shared = [compiler, "-shared", "-fPIC", str(source)]
    subprocess.run([*build_shared, "-Wl,-soname,libinside.so.2", "-o", str(provided)], check=True)
    extension = tmp_path / "site" / "extension.so"
    libraries = ["-Wl,--no-as-needed", f"-L{provided.parent}", "-l:libinside.so.2", "-lm"]
    subprocess.run([*build_shared, "-o", str(extension), *libraries], check=True)
    (tmp_path / "site" / "not-elf.so").write_text("INPUT(libm.so)")

    assert [name for name in system_libraries.needed(tmp_path / "site") if name != "libc.so.6"] == ["libm.so.6"]
    assert system_libraries.unloadable(Path(sys.executable), ["libm.so.6", "libinside.so.2"]) == ["libinside.so.2"]
