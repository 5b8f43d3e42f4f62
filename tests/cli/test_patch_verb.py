"""`harness patch`: whole commands, in a project whose wheels the test makes."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.packages import make_wheel
from fakes.projects import Project, project

BEFORE = "def greet(name):\n    return 'hello ' + name\n"
AFTER = "def greet(name):\n    return 'good day ' + name\n"
SPEC = "packages: [demo]\npatches: [polite]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Project]:
    with project(tmp_path, monkeypatch, capsys) as made:
        yield made


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def wheel(here: Project, version: str, text: str, *, index: bool = True) -> Path:
    if index:
        return here.wheel("demo", version, contents={"demo/greet.py": text})
    return make_wheel(here.root / "elsewhere", "demo", version, contents={"demo/greet.py": text})


def edited(here: Project, text: str, path: str = "demo/greet.py") -> Path:
    folder = here.root / "edited"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return folder


def new(here: Project, against: Path, *more: str, name: str = "polite", probe: str = "log good day") -> list[str]:
    texts = [
        "--description",
        "be polite",
        "--origin",
        "written here",
        "--remove-when",
        "demo is polite",
        "--probe",
        probe,
    ]
    return ["patch", "new", name, "--against", str(against), "--edited", str(here.root / "edited"), *texts, *more]


def made(here: Project, against: Path, *more: str) -> Path:
    edited(here, AFTER)
    said = here.run(*new(here, against, *more))
    assert (said.code, said.err) == (0, "")
    return here.root / "envspecs/patches/polite.patch"


def test_new_writes_a_patch_that_status_says_applies(here: Project) -> None:
    first = wheel(here, "1.0", BEFORE)
    path = made(here, first, "--absorbed-when", "demo/greet.py good day", "--upstream", "https://example.org/1")
    here.spec("app", SPEC)
    assert here.run("lock", "app").code == 0

    said = here.run("patch", "status", "app", "--json")

    assert said.code == 0
    assert said.json == [
        {
            "patch": "polite",
            "state": "applies",
            "reasons": [],
            "package": "demo",
            "version": "1.0",
            "against": first.name,
            "built": None,
        }
    ]
    assert path.read_text() == (
        "Description: be polite\n"
        "Origin: written here\n"
        "Upstream: https://example.org/1\n"
        "Applies-To: demo ==1.0\n"
        f"Target: demo/greet.py {sha(BEFORE)} {sha(AFTER)}\n"
        "Absorbed-When: demo/greet.py good day\n"
        "Remove-When: demo is polite\n"
        "Probe: log good day\n"
        "\n"
        "--- a/demo/greet.py\n"
        "+++ b/demo/greet.py\n"
        "@@ -1,2 +1,2 @@\n"
        " def greet(name):\n"
        "-    return 'hello ' + name\n"
        "+    return 'good day ' + name\n"
    )


def test_the_built_environment_has_the_patch_and_an_edited_byte_shows(here: Project) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    assert here.run("lock", "app").code == 0
    assert here.run("build", "app").code == 0
    built = next((here.root.parent / "home/envs").glob("*/lib/python3*/site-packages/demo/greet.py"))
    assert built.read_text() == AFTER

    assert here.run("patch", "status", "app", "--json").json[0]["built"] == "in place"
    built.write_text(AFTER.replace("good", "Good"))
    said = here.run("patch", "status", "app", "--json")

    assert said.code == 1
    assert said.json[0]["state"] == "applies"
    assert said.json[0]["built"] == "`demo/greet.py` was edited since patch `polite` was applied"


def test_each_of_the_four_states_at_an_upgrade(here: Project) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    states = {
        "1.0": BEFORE,
        "1.1": "# moved down\n" + BEFORE,
        "1.2": "# upstream\n" + AFTER,
        "1.3": BEFORE.replace("hello", "hi"),
    }
    found = {}
    for version, text in states.items():
        against = wheel(here, version, text, index=False)
        said = here.run("patch", "status", "app", "--against", str(against), "--json")
        found[version] = (said.code, said.json[0]["state"])

    assert found == {
        "1.0": (0, "applies"),
        "1.1": (1, "needs refresh"),
        "1.2": (1, "absorbed upstream"),
        "1.3": (1, "conflict"),
    }


def test_each_patch_is_a_line_with_its_reasons_under_it(here: Project) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    against = wheel(here, "1.3", BEFORE.replace("hello", "hi"), index=False)

    said = here.run("patch", "status", "app", "--against", str(against))

    assert said.out == (
        "polite  conflict           demo 1.3\n"
        "    `demo/greet.py`: the lines at 1 are not there as the patch knows them\n"
    )


def test_refresh_rewrites_the_patch_for_the_new_version(here: Project) -> None:
    path = made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    later = wheel(here, "1.1", "# moved down\n" + BEFORE, index=False)

    said = here.run("patch", "refresh", "polite", "--against", str(later))

    assert (said.code, said.out) == (0, f"{path}\n")
    assert "Applies-To: demo ==1.1\n" in path.read_text()
    assert "@@ -2,2 +2,2 @@\n" in path.read_text()
    assert here.run("patch", "status", "app", "--against", str(later)).code == 0


def test_refresh_under_another_name_leaves_the_old_one(here: Project) -> None:
    path = made(here, wheel(here, "1.0", BEFORE))
    old = path.read_bytes()
    later = wheel(here, "1.1", "# moved down\n" + BEFORE, index=False)

    assert here.run("patch", "refresh", "polite", "--against", str(later), "--to", "polite-1.1").code == 0

    assert path.read_bytes() == old
    assert (path.parent / "polite-1.1.patch").exists()


def test_refresh_of_a_conflict_says_so_and_writes_nothing(here: Project) -> None:
    path = made(here, wheel(here, "1.0", BEFORE))
    old = path.read_bytes()
    later = wheel(here, "2.0", "nothing alike\n", index=False)

    said = here.run("patch", "refresh", "polite", "--against", str(later))

    assert (said.code, said.out) == (1, "")
    assert said.err == (
        "error: `polite` cannot be refreshed for demo 2.0: conflict\n"
        "  `demo/greet.py`: the lines at 1 are not there as the patch knows them\n"
    )
    assert path.read_bytes() == old


def test_a_second_patch_of_the_same_file_is_written_and_judged_on_top_of_the_first(here: Project) -> None:
    first = wheel(here, "1.0", BEFORE)
    made(here, first)
    edited(here, AFTER + "\n\ndef leave():\n    return 'bye'\n")
    assert here.run(*new(here, first, "--on-top-of", "polite", name="bye")).code == 0
    here.spec("app", "packages: [demo]\npatches: [polite, bye]\n")
    assert here.run("lock", "app").code == 0

    said = here.run("patch", "status", "app", "--json")

    assert [row["state"] for row in said.json] == ["applies", "applies"]
    assert here.run("build", "app").code == 0
    built = next((here.root.parent / "home/envs").glob("*/lib/python3*/site-packages/demo/greet.py"))
    python = next((here.root.parent / "home/envs").glob("*/bin/python"))
    assert built.read_text().endswith("return 'bye'\n")
    words = subprocess.run(
        [python, "-c", "from demo.greet import greet, leave; print(greet('you'), leave())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert words.stdout == "good day you bye\n"


def test_a_patch_for_another_version_stops_the_build_and_leaves_nothing(here: Project) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    wheel(here, "1.1", "# moved down\n" + BEFORE)
    assert here.run("lock", "app").code == 0

    said = here.run("build", "app")

    assert said.code == 4
    assert "`polite` is for `demo ==1.0`, installed is `1.1`" in said.err
    assert "has sha256 " + sha("# moved down\n" + BEFORE) in said.err
    assert "hint: `harness patch status SPEC`" in said.err
    assert not list((here.root.parent / "home/envs").glob("*/lib"))


def test_a_spec_without_patches_says_so(here: Project) -> None:
    wheel(here, "1.0", BEFORE)
    here.spec("app", "packages: [demo]\n")
    assert here.run("lock", "app").code == 0

    said = here.run("patch", "status", "app")

    assert (said.code, said.out) == (0, "this spec has no patches\n")


def test_without_a_lock_the_way_on_is_named(here: Project) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)

    said = here.run("patch", "status", "app")

    assert said.code == 3
    assert said.err.endswith("hint: run `harness lock app`, or judge against a wheel with --against\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "ap"], "there is no spec `ap`"),
        (["status", "app", "--against", "none.whl"], "there is no wheel `none.whl`"),
        (["refresh", "polit", "--against", "WHEEL"], "did you mean `polite`?"),
        (["refresh", "polite", "--against", "OTHER"], "`polite` is for `demo`, the wheel is `other`"),
        (["status", "app", "--against", "OTHER"], "none of the wheels given is `demo`"),
        (["status", "app", "--against", "BROKEN"], "cannot read the wheel"),
        (["status", "app", "--against", "NAMELESS"], "is not the name of a wheel"),
    ],
)
def test_wrong_input_is_named(here: Project, arguments: list[str], message: str) -> None:
    made(here, wheel(here, "1.0", BEFORE))
    here.spec("app", SPEC)
    broken = here.root / "broken" / "demo-1.0-py3-none-any.whl"
    nameless = here.root / "broken" / "demo.whl"
    broken.parent.mkdir()
    broken.write_bytes(b"no zip")
    nameless.write_bytes(b"no zip")
    places = {
        "WHEEL": wheel(here, "1.1", BEFORE, index=False),
        "OTHER": make_wheel(here.root / "elsewhere", "other", "1.0"),
        "BROKEN": broken,
        "NAMELESS": nameless,
    }

    said = here.run("patch", *(str(places.get(word, word)) for word in arguments))

    assert (said.code, said.out) == (2, "")
    assert message in said.err


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (BEFORE, [], "nothing under"),
        (AFTER, ["--absorbed-when", "demo/none.py x"], "`Absorbed-When` names `demo/none.py`, which is no target"),
        (AFTER, ["--probe", "sound ping"], "`Probe` wants `log REGEX` or `python STATEMENT`, got `sound ping`"),
    ],
)
def test_new_refuses_what_would_not_be_a_patch(here: Project, text: str, more: list[str], message: str) -> None:
    first = wheel(here, "1.0", BEFORE)
    edited(here, text)

    said = here.run(*new(here, first, *more))

    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert not (here.root / "envspecs/patches/polite.patch").exists()


def test_new_names_files_that_the_wheel_does_not_have_and_a_patch_that_is_there(here: Project) -> None:
    first = wheel(here, "1.0", BEFORE)
    made(here, first)
    again = here.run(*new(here, first))
    edited(here, "x = 1\n", "demo/new.py")
    strange = here.run(*new(here, first, name="other"))

    assert (again.code, strange.code) == (2, 2)
    assert "there is a patch `polite` already" in again.err
    assert "`demo/new.py` is not in the wheel" in strange.err
