"""The project's own patches against the sglang wheels they were written for.

The communicator runs here for real but for what it stands on: torch and the GPU are played, so that what the headers
promise for SM120 on PCIe (`multicast_ptr` 0) can be seen without one.
"""

import ast
import base64
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from locked_wheels import locked_wheel

from harness.cli import main
from harness.env import patch, patch_file
from harness.env.patch_file import Patch

FOLDER = Path(__file__).parents[2] / "envspecs/patches"
COMMUNICATORS = "sglang/srt/distributed/device_communicators"
TABLE = f"{COMMUNICATORS}/all_reduce_utils.py"
COMMUNICATOR = f"{COMMUNICATORS}/torch_symm_mem.py"
KIMI = "sglang/srt/models/kimi_k25.py"
MIB = 1 << 20
# In the order a spec would have them, by the release they are for.
SETS = {
    "0.5.9": ("sm120-symm-mem-tables", "kimi-k25-eagle3-delegation"),
    "0.5.23": ("sm120-symm-mem-tables-0.5.23", "sm120-symm-mem-two-shot"),
}
SPECS = {"0.5.9": "sglang-0.5.9-cu128", "0.5.23": "sglang-cu130"}


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    return {release: locked_wheel(name, "sglang") for release, name in SPECS.items()}


def load(*names: str) -> tuple[Patch, ...]:
    return patch_file.load_named(FOLDER, names)


def installed(folder: Path, wheel: Path, release: str, patches: Sequence[Patch]) -> Path:
    """A site-packages with the files that some patches change, as the wheel has them."""
    read = patch.wheel_reader(wheel)
    for path in {target.path for one in patches for target in one.targets}:
        data = read(path)
        assert data is not None
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    info = folder / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    return folder


@pytest.mark.parametrize("release", SETS)
def test_the_patches_of_a_release_apply_to_its_wheel_and_compile(
    release: str, wheels: dict[str, Path], tmp_path: Path
) -> None:
    patches = load(*SETS[release])
    site = installed(tmp_path, wheels[release], release, patches)

    applied = patch.apply(patches, site)

    assert len(applied) == sum(len(one.targets) for one in patches)
    assert not any(item.already for item in applied)
    for item in applied:
        compile((site / item.path).read_bytes(), item.path, "exec")
    assert patch.verify(patches, site) == []
    assert all(item.already for item in patch.apply(patches, site))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("release", SETS)
def test_git_makes_the_same_bytes_of_them(release: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    patches = load(*SETS[release])
    site = installed(tmp_path, wheels[release], release, patches)
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for one in patches:
        command = ["git", "apply", "-p1", "--verbose", str(FOLDER / f"{one.name}.patch")]
        answer = subprocess.run(command, cwd=site, capture_output=True, text=True, env=environment, check=False)
        assert answer.returncode == 0, answer.stderr
        assert "offset" not in answer.stderr

    assert patch.verify(patches, site) == []


def test_every_patch_of_the_project_is_in_a_set_and_carries_little_of_what_it_changes() -> None:
    names = {path.name.removesuffix(".patch") for path in FOLDER.glob("sm120-*.patch")} | {"kimi-k25-eagle3-delegation"}
    assert {name for names in SETS.values() for name in names} == names
    for one in load(*sorted(names)):
        for target in one.targets:
            for hunk in target.hunks:
                assert len(hunk.before) <= 4, one.name


def test_the_size_table_gets_a_row_for_capability_12(wheels: dict[str, Path]) -> None:
    for release, name in (("0.5.9", "sm120-symm-mem-tables"), ("0.5.23", "sm120-symm-mem-tables-0.5.23")):
        plain, changed = (table(read) for read in readers(wheels[release], name))

        assert set(plain) == {9, 10}
        assert changed == {**plain, 12: {2: 64 * MIB, 4: 64 * MIB, 6: 128 * MIB, 8: 128 * MIB}}


def readers(wheel: Path, *names: str) -> tuple[patch.ReadTarget, patch.ReadTarget]:
    """The wheel's files, and the same with patches."""
    plain = read = patch.wheel_reader(wheel)
    for one in load(*names):
        read = patch.patched(one, read)
    return plain, read


def source(read: patch.ReadTarget, path: str) -> str:
    data = read(path)
    assert data is not None
    return data.decode()


def table(read: patch.ReadTarget) -> dict[int, dict[int, int]]:
    space: dict[str, Any] = {}
    exec(compile(source(read, TABLE), TABLE, "exec"), space)
    found: dict[int, dict[int, int]] = space["TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES"]
    return found


class Tensor:
    """Enough of a bf16 tensor on device `gpu` for the communicator."""

    def __init__(self, size: int) -> None:
        self.size, self.dtype, self.device, self.shape = size, BF16, "gpu", (size,)

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 2

    def view(self, *_: object) -> "Tensor":
        return self

    def copy_(self, _: object) -> "Tensor":
        return self

    def __getitem__(self, _: object) -> "Tensor":
        return self


BF16 = types.SimpleNamespace(itemsize=2)


@contextmanager
def played(read: patch.ReadTarget, multicast_ptr: int, kernels: list[str]) -> Iterator[types.ModuleType]:
    """The communicator's module, with torch and a box of eight capability-12.0 GPUs played."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("torch", "sglang")}

    def module(name: str, **content: object) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(content)
        sys.modules[name] = made
        return made

    handle = types.SimpleNamespace(multicast_ptr=multicast_ptr)
    memory = module(
        "torch.distributed._symmetric_memory",
        empty=lambda size, **_: Tensor(size),
        rendezvous=lambda *_: handle,
    )
    distributed = module("torch.distributed", get_world_size=lambda _: 8, ProcessGroup=object, _symmetric_memory=memory)
    operators = types.SimpleNamespace(
        multimem_all_reduce_=lambda *_: kernels.append("multimem"),
        two_shot_all_reduce_=lambda *_: kernels.append("two shot"),
    )
    module(
        "torch",
        distributed=distributed,
        device=lambda _: "gpu",
        Tensor=Tensor,
        bfloat16=BF16,
        empty_like=lambda tensor: tensor,
        ops=types.SimpleNamespace(symm_mem=operators),
        cuda=types.SimpleNamespace(set_device=lambda _: None, get_device_capability=lambda _: (12, 0)),
    )
    off = types.SimpleNamespace(get=lambda: False)
    module("sglang.srt.utils", is_cuda=lambda: True, is_hip=lambda: False)
    module("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_OPT_USE_INKLING_CUSTOM_AR=off))
    module("sglang.srt.runtime_context", get_exec=lambda: None)
    module(
        "sglang.srt.distributed.device_communicators.all_reduce_utils", TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES=table(read)
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.distributed.device_communicators"):
        module(name)
    made = module("communicator")
    try:
        exec(compile(source(read, COMMUNICATOR), COMMUNICATOR, "exec"), vars(made))
        yield made
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "sglang", "communicator")]:
            del sys.modules[name]
        sys.modules.update(saved)


def started(module: types.ModuleType) -> Any:
    return module.TorchSymmMemCommunicator(types.SimpleNamespace(group_name="tp"), 0)


def test_on_pcie_the_tables_alone_leave_symmetric_memory_off_and_the_probe_sees_it(
    wheels: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for release, name in (("0.5.9", "sm120-symm-mem-tables"), ("0.5.23", "sm120-symm-mem-tables-0.5.23")):
        plain, read = readers(wheels[release], name)
        (one,) = load(name)
        (probe,) = (probe.text for probe in one.probes if probe.kind == "log")
        caplog.clear()
        if release == "0.5.9":
            with played(plain, 0, []) as module, pytest.raises(KeyError, match="12"):
                started(module)
        else:
            with played(plain, 0, []) as module, caplog.at_level(logging.WARNING):
                assert started(module).disabled
            assert "Device capability 12 not supported" in caplog.text
        assert not re.search(probe, caplog.text)

        with played(read, 0, []) as module, caplog.at_level(logging.WARNING):
            assert started(module).disabled
        assert re.search(probe, caplog.text)


def test_with_multicast_the_tables_would_take_the_two_shot_kernel(wheels: dict[str, Path]) -> None:
    for release, name in (("0.5.9", "sm120-symm-mem-tables"), ("0.5.23", "sm120-symm-mem-tables-0.5.23")):
        kernels: list[str] = []
        with played(readers(wheels[release], name)[1], 1, kernels) as module:
            communicator = started(module)
            assert not communicator.disabled
            assert communicator.max_size == 128 * MIB
            communicator.all_reduce(Tensor(6144))
        assert kernels == ["two shot"]


def test_the_two_shot_patch_keeps_it_on_without_multicast(wheels: dict[str, Path]) -> None:
    kernels: list[str] = []
    with played(readers(wheels["0.5.23"], *SETS["0.5.23"])[1], 0, kernels) as module:
        communicator = started(module)
        assert not communicator.disabled
        communicator.all_reduce(Tensor(6144))
        too_large = communicator.all_reduce(Tensor(64 * MIB))
    assert kernels == ["two shot"]
    assert too_large is None


def test_kimi_passes_three_calls_on_to_its_language_model(wheels: dict[str, Path]) -> None:
    plain, read = readers(wheels["0.5.9"], "kimi-k25-eagle3-delegation")
    wanted = {"set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"}
    assert not wanted & set(methods(plain))
    found = {name: node for name, node in methods(read).items() if name in wanted}
    assert set(found) == wanted

    heard: list[tuple[str, tuple[object, ...]]] = []

    class Inner:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: heard.append((name, given)) or name

    body = ast.Module(
        [ast.ClassDef("Model", bases=[], keywords=[], body=list(found.values()), decorator_list=[], type_params=[])], []
    )
    annotations = {"Optional": {None: None}, "List": {int: None}, "torch": types.SimpleNamespace(Tensor=None)}
    space: dict[str, Any] = {"int": int, **annotations}
    exec(compile(ast.fix_missing_locations(body), KIMI, "exec"), space)
    model = space["Model"]()
    model.language_model = Inner()
    model.set_eagle3_layers_to_capture([2, 30, 58])
    model.set_eagle3_layers_to_capture()
    embedding_and_head = model.get_embed_and_head()
    model.set_embed_and_head("embedding", "head")

    assert embedding_and_head == "get_embed_and_head"
    assert heard == [
        ("set_eagle3_layers_to_capture", ([2, 30, 58],)),
        ("set_eagle3_layers_to_capture", (None,)),
        ("get_embed_and_head", ()),
        ("set_embed_and_head", ("embedding", "head")),
    ]


def methods(read: patch.ReadTarget) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(source(read, KIMI))
    (model,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KimiK25ForConditionalGeneration"
    )
    return {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("name", "release", "state"),
    [
        # The size table is byte-identical in both, the second table is not; delegation is upstream from 0.5.10.
        ("sm120-symm-mem-tables", "0.5.9", "applies"),
        ("sm120-symm-mem-tables", "0.5.23", "conflict"),
        ("sm120-symm-mem-tables-0.5.23", "0.5.23", "applies"),
        ("sm120-symm-mem-tables-0.5.23", "0.5.9", "needs refresh"),
        ("kimi-k25-eagle3-delegation", "0.5.9", "applies"),
        ("kimi-k25-eagle3-delegation", "0.5.23", "absorbed upstream"),
        ("sm120-symm-mem-two-shot", "0.5.9", "needs refresh"),
    ],
)
def test_each_patch_is_judged_against_each_release(
    name: str, release: str, state: str, wheels: dict[str, Path]
) -> None:
    (one,) = load(name)
    assert patch.status(one, patch.wheel_reader(wheels[release]), release).state == state


def test_the_command_says_it_of_the_published_stack(
    wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["patch", "status", "sglang-0.5.9-cu130-sm120", "--against", str(wheels["0.5.9"])])
    rows = capsys.readouterr().out.splitlines()

    assert code == 0
    assert [row.split()[:2] for row in rows] == [[name, "applies"] for name in SETS["0.5.9"]]


def test_a_wheel_is_read_by_member(wheels: dict[str, Path]) -> None:
    read = patch.wheel_reader(wheels["0.5.9"])
    data = read(TABLE)
    assert data is not None
    (row,) = (row for row in source(read, "sglang-0.5.9.dist-info/RECORD").splitlines() if row.startswith(TABLE))

    assert (
        row
        == f"{TABLE},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
    )
    assert read("sglang/none.py") is None
