"""Patches: read strictly, applied to exactly the bytes they were written for, judged at an upgrade."""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from harness.env import patch, patch_file
from harness.env.patch_file import Marker, Patch, Probe
from harness.errors import AnswerIsNo, BuildError, InputError

BEFORE = b"import os\n\n\ndef greet(name):\n    return 'hello ' + name\n\n\ndef leave():\n    return os.EX_OK\n"
AFTER = BEFORE.replace(b"'hello ' + name", b"f'good day, {name}'")
TEXT = """Description: greet politely
 and nothing else
Origin: written here
Upstream: https://example.org/pull/1
Applies-To: Demo ==1.0
Target: demo/greet.py {before} {after}
Absorbed-When: demo/greet.py good day
Remove-When: demo is polite by itself
Probe: log polite
Probe: python import demo.greet; assert 'day' in demo.greet.greet('x')

--- a/demo/greet.py
+++ b/demo/greet.py
@@ -4,2 +4,2 @@
 def greet(name):
-    return 'hello ' + name
+    return f'good day, {{name}}'
"""


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def text(before: bytes = BEFORE, after: bytes = AFTER) -> str:
    return TEXT.format(before=sha(before), after=sha(after))


def parsed(source: str) -> Patch:
    return patch_file.parse(source.encode(), "polite", "polite.patch")


def drafted(name: str, files: dict[str, tuple[bytes, bytes]], versions: str = "==1.0") -> Patch:
    header = Patch(
        name=name,
        sha256="",
        description="d",
        origin="o",
        upstream=(),
        package="demo",
        versions=SpecifierSet(versions, prereleases=True),
        targets=(),
        absorbed_when=(),
        remove_when="r",
        probes=(Probe("log", "x"),),
    )
    return patch.draft(header, files)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo/greet.py").write_bytes(BEFORE)
    (folder / "demo/other.py").write_bytes(b"one\ntwo\nthree\n")
    info = folder / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    return folder


# --- reading


def test_a_patch_file_gives_its_header_targets_and_hunks() -> None:
    read = parsed(text())

    assert read.sha256 == sha(text().encode())
    assert read.description == "greet politely\nand nothing else"
    assert (read.package, str(read.versions)) == ("demo", "==1.0")
    assert read.upstream == ("https://example.org/pull/1",)
    assert read.absorbed_when == (Marker("demo/greet.py", "good day"),)
    assert [probe.kind for probe in read.probes] == ["log", "python"]
    (target,) = read.targets
    assert (target.path, target.before, target.after) == ("demo/greet.py", sha(BEFORE), sha(AFTER))
    (hunk,) = target.hunks
    assert hunk.line == 4
    assert hunk.before == (b"def greet(name):\n", b"    return 'hello ' + name\n")


def test_all_faults_of_a_patch_come_at_once_with_their_lines() -> None:
    broken = (
        text()
        .replace("Origin: written here", "Orgin: written here")
        .replace("Applies-To: Demo ==1.0", "Applies-To: Demo one point oh")
        .replace("Probe: log polite", "Probe: log (")
        .replace("@@ -4,2 +4,2 @@", "@@ -4,3 +4,2 @@")
    )
    with pytest.raises(InputError) as caught:
        parsed(broken)

    assert caught.value.details == (
        "polite.patch:1:1: header field `Origin` is missing",
        "polite.patch:3:1: unknown header field `Orgin` (did you mean `Origin`?)",
        "polite.patch:5:1: `one point oh` is no version specifier (for instance `==0.5.9`)",
        "polite.patch:9:1: `Probe: log` wants a regular expression: missing ), unterminated subpattern at position 0",
        "polite.patch:14:1: the hunk says -3 +2 lines, it has -2 +2",
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("Origin: written here", "Origin:", 3, "header field `Origin` is empty"),
        ("Origin: written here", "Origin: a\nOrigin: b", 4, "header field `Origin` is given twice"),
        ("Description: greet politely\n and", " and", 1, "a continuation line before any field"),
        ("Applies-To: Demo ==1.0", "Applies-To: Demo", 5, "`Applies-To` wants `PACKAGE VERSIONS`, got `Demo`"),
        ("Target: demo/greet.py", "Target: ../greet.py", 6, "target `../greet.py` leaves site-packages"),
        ("Target: demo/greet.py", "Target: demo/great.py", 6, "target `demo/great.py` has no hunks in the diff"),
        ("Target: demo/greet.py ", "Target: demo/greet.py ab ", 6, "`Target` wants `PATH SHA256-BEFORE SHA256-AFTER`"),
        ("Absorbed-When: demo/greet.py good day", "Absorbed-When: demo/x.py y", 7, "which is no target"),
        ("Probe: log polite", "Probe: smell polite", 9, "`Probe` wants `log REGEX` or `python STATEMENT`"),
        ("assert 'day'", "assert day'", 10, "`Probe: python` does not compile"),
        ("+++ b/demo/greet.py", "+++ /dev/null", 12, "it neither creates nor deletes them"),
        ("+++ b/demo/greet.py", "+++ b/demo/gruss.py", 12, "name different files"),
        ("@@ -4,2 +4,2 @@", "@@ -4,2 +5,2 @@", 14, "the hunk starts at new line 5, by the hunks before it that is 4"),
        ("+    return f", "*    return f", 14, "the hunk says -2 +2 lines, it has -2 +1"),
        ("+    return f'good day, {name}'", "+    return 'hello ' + name", 14, "the hunk changes nothing"),
    ],
)
def test_each_fault_names_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in text()
    with pytest.raises(InputError) as caught:
        parsed(text().replace(old, new))

    lines = [row for row in str(caught.value).splitlines() if message in row]
    assert lines, str(caught.value)
    assert lines[0].strip().startswith(f"polite.patch:{line}:1: ")


def test_a_file_without_a_diff_is_no_patch() -> None:
    with pytest.raises(InputError, match="no diff follows the header"):
        parsed(text().split("--- a/")[0])


def test_an_unknown_patch_name_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "polite.patch").write_text(text())
    with pytest.raises(InputError) as caught:
        patch_file.load_named(tmp_path, ["polit"])

    assert str(caught.value) == f"no patch `polit` in `{tmp_path}`\n\nhint: did you mean `polite`?"


def test_the_faults_of_several_named_patches_come_together(tmp_path: Path) -> None:
    (tmp_path / "polite.patch").write_text(text())
    (tmp_path / "broken.patch").write_text(text().replace("Origin", "Orgin"))
    with pytest.raises(InputError) as caught:
        patch_file.load_named(tmp_path, ["polite", "broken", "absent"])

    assert caught.value.message == "2 patches cannot be read"
    assert any("Orgin" in line for line in caught.value.details)
    assert any("no patch `absent`" in line for line in caught.value.details)


def test_a_patch_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read patch .*: No such file or directory"):
        patch_file.load(tmp_path / "none.patch")


def test_a_rendered_patch_reads_as_the_same_patch() -> None:
    read = parsed(text())
    assert patch_file.parse(patch_file.render(read), "polite", "x") == parsed(patch_file.render(read).decode())
    assert patch_file.render(parsed(patch_file.render(read).decode())) == patch_file.render(read)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_done_to_a_patch_file_it_is_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(text().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        junk = data.draw(
            st.sampled_from(
                [b"", b"\n", b"@@ -0 +0 @@\n", b"--- ", b"\\ No newline", b"\x00", b"\xff", b":", b"9" * 20]
            )
        )
        raw[start : start + data.draw(st.integers(0, 9))] = junk
    with contextlib.suppress(InputError):
        patch_file.parse(bytes(raw), "p", "p.patch")


# --- against other tools

LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"-- c", b"++ d", b" e", b"f\r", b"\\ g"]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(old=LINES, new=LINES, ends=st.tuples(st.booleans(), st.booleans()))
def test_what_difflib_would_restore_is_what_we_write(
    old: list[bytes], new: list[bytes], ends: tuple[bool, bool]
) -> None:
    before = b"\n".join(old) + (b"\n" if ends[0] and old else b"")
    after = b"\n".join(new) + (b"\n" if ends[1] and new else b"")
    if before == after or not before:
        return
    made = drafted("p", {"demo/x.py": (before, after)})
    link = patch._Link("p", patch_file.parse(patch_file.render(made), "p", "p").targets[0])

    assert patch._rewrite(before, link) == after


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BEFORE, AFTER),
        (BEFORE, BEFORE.rstrip(b"\n")),
        (b"no end", b"no end\nmore"),
        (b"a\r\nb\r\nc\r\n", b"a\r\nB\r\nc\r\n"),
        (b"x\n" * 40, b"x\n" * 20 + b"y\n" + b"x\n" * 20),
        (b"-- sql\nkeep\n", b"++ other\nkeep\n"),
    ],
)
def test_git_applies_our_diff_to_the_same_bytes_without_any_offset(tmp_path: Path, before: bytes, after: bytes) -> None:
    made = drafted("p", {"demo/x.py": (before, after)})
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/x.py").write_bytes(before)
    (tmp_path / "p.patch").write_bytes(patch_file.render(made))
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = ["git", "apply", "-p1", "--verbose", "--unidiff-zero", "--whitespace=nowarn", "p.patch"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)

    assert answer.returncode == 0, answer.stderr
    assert "offset" not in answer.stderr
    assert (tmp_path / "demo/x.py").read_bytes() == after


def test_a_diff_made_by_difflib_is_read_and_applied(site: Path) -> None:
    rows = difflib.unified_diff(
        BEFORE.decode().splitlines(keepends=True),
        AFTER.decode().splitlines(keepends=True),
        "a/demo/greet.py",
        "b/demo/greet.py",
    )
    source = text().split("--- a/")[0] + "".join(rows)
    patch.apply([parsed(source)], site)

    assert (site / "demo/greet.py").read_bytes() == AFTER


# --- applying


def test_applying_changes_the_target_and_says_so(site: Path) -> None:
    applied = patch.apply([parsed(text())], site)

    assert applied == [patch.Applied("polite", "demo/greet.py", sha(BEFORE), sha(AFTER), already=False)]
    assert (site / "demo/greet.py").read_bytes() == AFTER


def test_applying_twice_is_recognised_as_applied(site: Path) -> None:
    patch.apply([parsed(text())], site)
    first = (site / "demo/greet.py").stat()
    applied = patch.apply([parsed(text())], site)

    assert [item.already for item in applied] == [True]
    assert (site / "demo/greet.py").stat().st_ino == first.st_ino


def test_a_target_with_other_bytes_is_refused_by_name_and_nothing_is_written(site: Path) -> None:
    both = drafted(
        "both",
        {"demo/other.py": (b"one\ntwo\nthree\n", b"one\n2\nthree\n"), "demo/greet.py": (BEFORE, AFTER)},
    )
    edited = BEFORE + b"# one more line, far from every hunk\n"
    (site / "demo/greet.py").write_bytes(edited)
    with pytest.raises(BuildError) as caught:
        patch.apply([both], site)

    assert caught.value.details == (
        f"`both`: `demo/greet.py` has sha256 {sha(edited)}, the patch was written for {sha(BEFORE)}",
    )
    assert caught.value.exit_code == 4
    assert (site / "demo/other.py").read_bytes() == b"one\ntwo\nthree\n"


def test_every_misfit_is_named_at_once(site: Path) -> None:
    other_version = drafted("late", {"demo/other.py": (b"one\ntwo\nthree\n", b"1\ntwo\nthree\n")}, "==2.0")
    gone = drafted("gone", {"demo/none.py": (b"a\n", b"b\n")})
    with pytest.raises(BuildError) as caught:
        patch.apply([other_version, gone], site)

    assert caught.value.details == (
        "`late` is for `demo ==2.0`, installed is `1.0`",
        "`gone`: cannot read `demo/none.py`: No such file or directory",
    )


def test_a_patch_for_a_package_that_is_not_installed_is_refused(site: Path) -> None:
    with pytest.raises(BuildError) as caught:
        patch.apply([parsed(text().replace("Applies-To: Demo", "Applies-To: absent"))], site)

    assert caught.value.details == ("`polite` is for `absent`, which is not installed",)


def test_a_header_that_does_not_match_its_hunks_is_refused(site: Path) -> None:
    with pytest.raises(BuildError, match=r"its hunks give `demo/greet.py` sha256"):
        patch.apply([parsed(text(after=AFTER + b"\n"))], site)
    assert (site / "demo/greet.py").read_bytes() == BEFORE


def test_a_hunk_one_line_off_is_refused_though_its_text_is_there(site: Path) -> None:
    moved = text().replace("@@ -4,2 +4,2 @@", "@@ -5,2 +5,2 @@")
    with pytest.raises(BuildError, match=r"`demo/greet.py` line 5 is not what the patch expects"):
        patch.apply([parsed(moved)], site)


def test_patches_of_one_file_build_on_each_other_from_wherever_the_file_stands(site: Path) -> None:
    last = AFTER.replace(b"os.EX_OK", b"0")
    chain = [
        drafted("first", {"demo/greet.py": (BEFORE, AFTER)}),
        drafted("second", {"demo/greet.py": (AFTER, last)}),
    ]
    patch.apply(chain[:1], site)
    applied = patch.apply(chain, site)

    assert [(item.patch, item.already) for item in applied] == [("first", True), ("second", False)]
    assert (site / "demo/greet.py").read_bytes() == last


def test_two_patches_of_one_file_that_do_not_chain_are_refused(site: Path) -> None:
    rivals = [
        drafted("first", {"demo/greet.py": (BEFORE, AFTER)}),
        drafted("second", {"demo/greet.py": (BEFORE, BEFORE + b"#\n")}),
    ]
    with pytest.raises(BuildError) as caught:
        patch.apply(rivals, site)

    assert caught.value.details == ("`second` was not written on top of `first`, and both change `demo/greet.py`",)


def test_a_failed_write_puts_back_what_was_written_before_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = drafted(
        "both",
        {"demo/greet.py": (BEFORE, AFTER), "demo/other.py": (b"one\ntwo\nthree\n", b"one\n2\nthree\n")},
    )
    real = patch.write_atomic

    def failing(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        if path.name == "other.py":
            raise InputError(f"cannot write `{path}`: No space left on device")
        real(path, data, mode=mode)

    monkeypatch.setattr(patch, "write_atomic", failing)
    with pytest.raises(BuildError, match="No space left on device"):
        patch.apply([both], site)

    assert (site / "demo/greet.py").read_bytes() == BEFORE


def test_a_file_shared_with_the_installers_cache_is_replaced_not_written_into(site: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cache.py"
    os.link(site / "demo/greet.py", cached)
    (site / "demo/greet.py").chmod(0o755)
    patch.apply([parsed(text())], site)

    assert cached.read_bytes() == BEFORE
    assert (site / "demo/greet.py").stat().st_mode & 0o777 == 0o755


# --- verifying


def test_what_was_applied_verifies_and_one_edited_byte_does_not(site: Path) -> None:
    one = parsed(text())
    patch.apply([one], site)
    assert patch.verify([one], site) == []

    edited = AFTER.replace(b"good", b"Good")
    (site / "demo/greet.py").write_bytes(edited)

    assert patch.verify([one], site) == [
        patch.Drift(
            "polite",
            "demo/greet.py",
            sha(AFTER),
            sha(edited),
            "`demo/greet.py` was edited since patch `polite` was applied",
        )
    ]


def test_an_unpatched_or_missing_target_is_drift(site: Path) -> None:
    one = parsed(text())
    assert [item.message for item in patch.verify([one], site)] == ["`demo/greet.py` is without patch `polite`"]
    (site / "demo/greet.py").unlink()
    (drift,) = patch.verify([one], site)
    assert (drift.seen, drift.message) == (None, "`demo/greet.py` is gone")


# --- upgrades


def judged(one: Patch, files: dict[str, bytes], version: str = "1.0") -> patch.Status:
    return patch.status(one, files.get, version)


def plain() -> Patch:
    return drafted("polite", {"demo/greet.py": (BEFORE, AFTER)})


def test_the_same_bytes_apply() -> None:
    assert judged(plain(), {"demo/greet.py": BEFORE}) == patch.Status("polite", "applies", ())


def test_the_same_bytes_in_another_version_need_the_header_refreshed() -> None:
    now = judged(plain(), {"demo/greet.py": BEFORE}, "1.1")
    assert now.state == "needs refresh"
    assert now.reasons == ("`Applies-To` says demo ==1.0, this is 1.1",)


def test_a_file_that_changed_elsewhere_needs_a_refresh_and_gets_it() -> None:
    later = b"# a new first line\n" + BEFORE
    now = judged(plain(), {"demo/greet.py": later}, "1.1")
    fresh = patch.refreshed(plain(), {"demo/greet.py": later}.get, "1.1")

    assert now.state == "needs refresh"
    assert str(fresh.versions) == "==1.1"
    assert fresh.targets[0].hunks[0].line == plain().targets[0].hunks[0].line + 1
    assert judged(fresh, {"demo/greet.py": later}, "1.1").state == "applies"
    assert patch.patched(fresh, {"demo/greet.py": later}.get)("demo/greet.py") == b"# a new first line\n" + AFTER


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("extra", [b"", b"# elsewhere\n"])
def test_a_change_that_upstream_made_too_is_absorbed(extra: bytes, version: str) -> None:
    assert judged(plain(), {"demo/greet.py": extra + AFTER}, version).state == "absorbed upstream"


def test_an_insertion_upstream_made_too_is_absorbed_though_its_context_is_there() -> None:
    before, after = b"a\nb\nc\n", b"a\nb\nnew\nc\n"
    one = drafted("insert", {"x.py": (before, after)})
    assert judged(one, {"x.py": b"z\n" + after}).state == "absorbed upstream"
    assert judged(one, {"x.py": b"z\n" + before}).state == "needs refresh"


def test_a_deletion_is_not_absorbed_while_its_lines_are_there() -> None:
    before, after = b"a\nb\nold\n", b"a\nb\n"
    one = drafted("delete", {"x.py": (before, after)})
    assert judged(one, {"x.py": b"z\n" + before}).state == "needs refresh"
    assert judged(one, {"x.py": b"z\n" + after}).state == "absorbed upstream"


def test_absorbed_in_other_words_is_seen_by_the_marker() -> None:
    upstream = {"demo/greet.py": BEFORE.replace(b"'hello ' + name", b'"good day " + name')}
    now = judged(parsed(text()), upstream)
    assert (now.state, now.reasons) == ("absorbed upstream", ("`demo/greet.py` has `good day`",))


def test_rewritten_lines_or_a_missing_file_are_a_conflict() -> None:
    rewritten = judged(plain(), {"demo/greet.py": BEFORE.replace(b"hello", b"hi")})
    assert rewritten.state == "conflict"
    assert rewritten.reasons == ("`demo/greet.py`: the lines at 4 are not there as the patch knows them",)
    assert judged(plain(), {}).reasons == ("`demo/greet.py` is not there any more",)


def test_lines_that_stand_in_two_places_are_a_conflict() -> None:
    assert judged(plain(), {"demo/greet.py": BEFORE + BEFORE}).state == "conflict"


def test_refreshing_drops_the_part_that_upstream_has() -> None:
    other = b"one\ntwo\nthree\n"
    both = drafted("both", {"demo/greet.py": (BEFORE, AFTER), "demo/other.py": (other, other.replace(b"two", b"2"))})
    marked = dataclasses.replace(both, absorbed_when=(Marker("demo/greet.py", "never there"),))
    later = {"demo/greet.py": b"# upstream\n" + AFTER, "demo/other.py": b"zero\n" + other}
    fresh = patch.refreshed(marked, later.get, "1.1")

    assert [target.path for target in fresh.targets] == ["demo/other.py"]
    assert fresh.absorbed_when == ()
    assert patch_file.parse(patch_file.render(fresh), "both", "x") == fresh


def test_refreshing_the_header_alone_keeps_the_change_where_it_was() -> None:
    # By hand, with too little context: the hunk's lines stand twice, its line number says which is meant.
    before = b"a\nb\nx\na\nb\ny\n"
    after = b"a\nb\nx\na\nB\ny\n"
    made = drafted("thin", {"demo/x.py": (before, after)})
    target = dataclasses.replace(made.targets[0], hunks=(patch_file.Hunk(4, (b"a\n", b"b\n"), (b"a\n", b"B\n")),))
    thin = dataclasses.replace(made, targets=(target,))
    fresh = patch.refreshed(thin, {"demo/x.py": before}.get, "1.1")

    assert patch.patched(fresh, {"demo/x.py": before}.get)("demo/x.py") == after


def test_a_conflict_is_not_refreshed() -> None:
    with pytest.raises(AnswerIsNo) as caught:
        patch.refreshed(plain(), {}.get, "2.0")
    assert caught.value.message == "`polite` cannot be refreshed for demo 2.0: conflict"


def test_context_is_no_more_than_makes_a_place_unambiguous() -> None:
    rows = [b"def one():\n", b"    pass\n", b"\n", b"def two():\n", b"    pass\n", b"\n"]
    after = [*rows[:4], b"    return 2\n", rows[5]]
    made = drafted("p", {"x.py": (b"".join(rows), b"".join(after))})
    (hunk,) = made.targets[0].hunks
    # One line either side: `def two():` stands in one place only.
    assert hunk.before == (b"def two():\n", b"    pass\n", b"\n")
