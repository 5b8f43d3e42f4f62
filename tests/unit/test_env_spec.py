"""Specs are read strictly, and every fault names its place."""

from pathlib import Path

import pytest
from packaging.tags import Tag

from harness.env import spec
from harness.env.resolve import wheel_tags
from harness.env.spec import Platform
from harness.errors import InputError

HEAD = 'env: demo\npython: "3.12"\npackages: [server==1.2]\n'


def write(folder: Path, text: str, name: str = "demo") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        spec.load(path)
    return str(caught.value)


def test_a_package_is_text_or_a_mapping(tmp_path: Path) -> None:
    text = 'packages: [server==1.2, "tool[fast]>=2,<3", {name: torch, version: 2.9.1+cu130, index: pytorch}, any]\n'
    loaded = spec.load(
        write(tmp_path, 'env: demo\npython: "3.12"\nindexes: {pytorch: https://example.org/whl}\n' + text)
    )
    assert [package.requirement for package in loaded.packages] == [
        "server==1.2",
        "tool[fast]<3,>=2",
        "torch==2.9.1+cu130",
        "any",
    ]


def test_an_unknown_key_is_named_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "varables: {A: b}\n")
    assert refusal(path) == f"{path}:4:1: unknown key `varables`\n\nhint: did you mean `variables`?"


def test_all_faults_of_a_spec_are_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'env: demo\npython: "2.7"\ncuda: {toolkit: 13.0.1, arch: [120a], driver: ">=580"}\n'
        'packages: ["server=1.2"]\nvarables: {}\n',
    )
    assert refusal(path).splitlines() == [
        "4 faults",
        f'  {path}:2:1: `python`: "2.7" allows no Python we know; write "3.12" or ">=3.11,<3.14", got `"2.7"`',
        f"  {path}:3:25: `cuda.arch`: `120a` is not an architecture; write it like `sm_120a`",
        f"  {path}:4:12: `packages[0]`: `server=1.2` is not a requirement: Expected semicolon (after name with no "
        'version specifier) or end, got `"server=1.2"`',
        f"  {path}:5:1: unknown key `varables` (did you mean `variables`?)",
    ]


def test_an_index_that_is_not_named_is_a_fault(tmp_path: Path) -> None:
    text = (
        HEAD.replace("[server==1.2]", "[{name: torch, index: pytroch}]")
        + "indexes: {pytorch: https://example.org/whl}\n"
    )
    path = write(tmp_path, text)
    assert refusal(path) == (
        f"{path}:3:26: `packages[0].index`: no index `pytroch` is named in `indexes`\n\nhint: did you mean `pytorch`?"
    )


def test_the_name_inside_must_be_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD, "other")
    assert refusal(path).startswith(f"{path}:1:1: `env` is `demo`, the file is `other.yaml`")


def test_a_package_named_twice_is_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD.replace("[server==1.2]", "[sgl-kernel==1, sgl_kernel==2]"))
    assert "packages named twice: `sgl-kernel`" in refusal(path)


def test_a_spec_lays_itself_over_the_one_it_extends(tmp_path: Path) -> None:
    write(
        tmp_path,
        HEAD.replace("demo", "base")
        + "variables: {A: one, B: two}\ncuda: {toolkit: 12.8.1, arch: [sm_120a], driver: '>=570'}\n",
        "base",
    )
    child = spec.load(
        write(tmp_path, "extends: base\nenv: demo\nvariables: {B: three, A: null}\ncuda: {toolkit: 13.0.1}\n")
    )
    assert child.variables == {"B": "three"}
    assert child.cuda is not None
    assert (child.cuda.toolkit, child.cuda.driver) == ("13.0.1", ">=570")


def test_a_fault_in_an_inherited_value_names_the_file_it_was_written_in(tmp_path: Path) -> None:
    base = write(tmp_path, HEAD.replace("demo", "base") + "platform: {arch: x86}\n", "base")
    path = write(tmp_path, "extends: base\nenv: demo\n")
    assert refusal(path).startswith(f"{base}:4:12: `platform.arch`: must be 'x86_64' or 'aarch64', got `\"x86\"`")


def test_specs_that_extend_each_other_are_refused_as_a_circle(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        write(tmp_path, f"extends: {base}\nenv: {name}\n", name)
    assert (
        refusal(tmp_path / "a.yaml")
        == f"{tmp_path / 'c.yaml'}:1:1: specs extend each other in a circle: a -> b -> c -> a"
    )


def test_a_base_that_does_not_exist_gets_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path, HEAD.replace("demo", "sglang-cu130"), "sglang-cu130")
    path = write(tmp_path, "extends: sglang-cu13\nenv: demo\n")
    assert refusal(path).endswith("hint: did you mean `sglang-cu130`?")


def test_comments_order_and_description_leave_the_digest_alone_and_software_does_not(tmp_path: Path) -> None:
    first = spec.load(write(tmp_path, HEAD + "variables: {A: one, B: two}\n"))
    same = spec.load(write(tmp_path, "# why\ndescription: words\nvariables: {B: two, A: one}\n" + HEAD))
    other = spec.load(write(tmp_path, HEAD + "variables: {A: one, B: 'three'}\n"))
    assert first.digest == same.digest
    assert first.digest != other.digest


def test_credentials_in_an_address_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "indexes: {own: https://me:secret@example.org/simple}\n")
    message = refusal(path)
    assert "the address of `own` holds a user name" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.12", ("3.12",)),
        (">=3.11,<3.14", ("3.11", "3.12", "3.13")),
        ("==3.11.*", ("3.11",)),
        (">=3.11.4,<3.12", ("3.11",)),
    ],
)
def test_a_range_of_pythons_is_the_minor_versions_it_allows(
    text: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    loaded = spec.load(write(tmp_path, HEAD.replace("3.12", text)))
    assert loaded.pythons == expected


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ("python_version < '3.12'", False),
        ("python_full_version < '3.12.4'", True),  # some 3.12 releases need it, so the lock carries it
        ("sys_platform == 'win32'", False),
        ("platform_machine == 'x86_64' and platform_python_implementation == 'CPython'", True),
    ],
)
def test_markers_are_decided_for_the_specs_platform_and_not_for_this_machine(marker: str, holds: bool) -> None:
    assert spec.marker_holds(marker, "3.12", Platform(glibc="2.39")) is holds


def test_wheel_tags_follow_pep_425_and_600_from_close_to_loose() -> None:
    tags = list(wheel_tags("3.12", Platform(glibc="2.39")))

    def rank(text: str) -> int:
        return tags.index(Tag(*text.split("-")))

    assert tags[0] == Tag("cp312", "cp312", "manylinux_2_39_x86_64")
    # PEP 600: manylinux2014 is manylinux_2_17, manylinux2010 is 2_12, manylinux1 is 2_5.
    assert rank("cp312-cp312-manylinux_2_17_x86_64") + 1 == rank("cp312-cp312-manylinux2014_x86_64")
    assert rank("cp312-cp312-manylinux_2_5_x86_64") + 1 == rank("cp312-cp312-manylinux1_x86_64")
    assert (
        rank("cp312-cp312-manylinux_2_17_x86_64")
        < rank("cp312-abi3-manylinux_2_39_x86_64")
        < rank("cp310-abi3-manylinux2014_x86_64")
        < rank("py3-none-manylinux_2_28_x86_64")
        < rank("py3-none-any")
    )
    texts = {str(tag) for tag in tags}
    assert not texts & {
        "cp312-cp312-manylinux_2_40_x86_64",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp313-abi3-linux_x86_64",
    }


def test_every_spec_of_the_project_loads() -> None:
    folder = Path(__file__).parents[2] / "envspecs"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    assert {
        "llamacpp-cpu",
        "sglang-cu130",
        "sglang-cu130-nightly",
        "sglang-0.5.9-cu130-sm120",
        "sglang-0.5.9-cu128",
    } <= {spec.load(folder / f"{name}.yaml").env for name in names}


def test_the_documentation_names_every_key_of_a_spec() -> None:
    page = (Path(__file__).parents[2] / "docs" / "specs-and-locks.md").read_text()
    documented = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert documented == {*spec.EnvSpec.model_fields, "extends"}
