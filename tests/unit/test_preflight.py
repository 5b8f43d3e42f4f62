import json
import os
import resource
import shutil
import socket
import struct
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import Fault, InputError
from harness.run import facts, gpu, modelfiles, ports, preflight
from harness.run.preflight import Need

DEVICE = gpu.Gpu(
    0, "RTX PRO 6000", "GPU-0", (12, 0), 96 << 30, 100 << 20, (), power_limit_w=600.0, power_default_w=600.0
)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine is busy with is no part of these tests."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(facts, "governors", dict)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def messages(need: Need, *, fatal: bool = True) -> list[str]:
    ours = {"an earlier run"}  # somebody else's test may just be killing a harness
    return [str(one) for one in preflight.check(need) if one.fatal is fatal and one.subject not in ours]


def with_gpus(monkeypatch: pytest.MonkeyPatch, *devices: gpu.Gpu, driver: str = "580.95.05") -> None:
    monkeypatch.setattr(gpu, "gpus", lambda: devices)
    monkeypatch.setattr(gpu, "driver", lambda: (driver, 13000) if devices else None)


def test_a_machine_that_has_what_is_needed_gives_no_trouble(tmp_path: Path) -> None:
    assert messages(Need(tmp_path / "runs" / "a-run", port=ports.choose_port("127.0.0.1", None))) == []


def test_all_faults_come_in_one_list_and_refuse_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        need = Need(tmp_path, port=port, model=tmp_path / "none.gguf", gpus=8, guard=lambda: [Fault("torch drifted")])
        troubles = [one for one in preflight.check(need) if one.subject != "an earlier run"]
    assert [one.subject for one in troubles] == [f"port {port}", "GPU", "model", "environment"]
    assert troubles[0].message.startswith(f"taken by pid {os.getpid()} (")
    with pytest.raises(InputError) as caught:
        preflight.refuse(troubles)
    assert caught.value.message == "4 faults"
    assert caught.value.details[1:] == (
        "GPU: 8 needed, none found (is the driver loaded?)",
        f"model: `{tmp_path}/none.gguf` does not exist (fetch the whole model again, or correct `model.path`)",
        "environment: torch drifted",
    )
    assert caught.value.hint == "`--wait-free 10m` waits for what is in use"


def test_a_gpu_that_somebody_uses_is_refused_by_pid_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, replace(DEVICE, memory_used=40 << 30, users=((os.getpid(), 39 << 30),)))
    [trouble] = [one for one in preflight.check(Need(tmp_path, gpus=1)) if one.subject.startswith("GPU")]
    assert trouble.message.startswith(f"in use by pid {os.getpid()} (")
    assert trouble.message.endswith("using 39936 MiB")
    assert (trouble.fatal, trouble.passing) == (True, True)


@pytest.mark.parametrize(
    ("change", "need", "message"),
    [
        ({"capability": (9, 0)}, {"capability": (12, 0)}, "compute capability 9.0, the environment is built for 12.0"),
        ({"memory_used": 2 << 30}, {}, "2048 MiB in use by nobody we can see (a container or a dying process?)"),
        ({}, {"gpu_bytes": 96 << 30}, "98204 MiB free, 98304 MiB needed"),
    ],
)
def test_a_gpu_that_is_not_as_needed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, need: dict, message: str
) -> None:
    with_gpus(monkeypatch, replace(DEVICE, **change))
    assert messages(Need(tmp_path, gpus=1, **need)) == [f"GPU 0 (RTX PRO 6000): {message}"]


def test_a_capped_or_throttled_gpu_is_a_warning_and_an_idle_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, replace(DEVICE, power_limit_w=450.0, throttle=0x41), replace(DEVICE, index=1, throttle=0x1))
    assert messages(Need(tmp_path, gpus=1)) == []
    assert messages(Need(tmp_path, gpus=1), fatal=False) == [
        "GPU 0 (RTX PRO 6000): power capped at 450 W of 600 W (`nvidia-smi -pl` sets it)",
        "GPU 0 (RTX PRO 6000): held back before anything started: hardware thermal slowdown",
    ]


@pytest.mark.parametrize(
    ("found", "ok"), [("580.95.05", True), ("590.1", True), ("579.99", False), ("570.172.08", False)]
)
def test_the_drivers_floor_is_compared_as_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, ok: bool
) -> None:
    with_gpus(monkeypatch, DEVICE, driver=found)
    wanted = f"driver: {found}, the environment needs 580 or newer (update the NVIDIA driver)"
    assert messages(Need(tmp_path, gpus=1, driver="580")) == ([] if ok else [wanted])


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 30, 100 << 30, 5 << 20))
    assert messages(Need(tmp_path / "runs", run_bytes=1 << 30)) == [
        f"disk: 5 MiB free at `{tmp_path}`, up to 1024 MiB needed"
    ]


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(slice(None), pair))
    assert messages(Need(tmp_path, concurrency=100)) == []
    assert limits == [456, 1024]  # 2 x 100 streams and 256 beside
    assert messages(Need(tmp_path, concurrency=1000)) == [
        "open files: the limit is 1024, concurrency 1000 needs 2256 (`ulimit -Hn 2256` as root, or LimitNOFILE)"
    ]
    assert limits == [1024, 1024]


def test_a_stale_jit_lock_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "py312" / "kernel" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert messages(Need(tmp_path)) == [
        f"JIT lock: `{lock}` was left by a build that is gone; a server would wait for it (remove it)"
    ]


def test_governor_and_load_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "governors", lambda: {"powersave": 16, "performance": 16})
    monkeypatch.setattr(facts, "usable_cpus", lambda: 4.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert messages(Need(tmp_path), fatal=False) == [
        "CPU governor: powersave on 16 CPUs (`cpupower frequency-set -g performance` steadies the client)",
        "CPU: load average 2.5 on 4 CPUs before anything started (others are using this machine)",
    ]


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        ({"before": {"cpu": {"load_average": [3.4, 1.0, 1.0], "usable": 2.0}}},
         ["others were using this machine: load average 3.4 on 2 CPUs before anything started"]),
        ({"before": {"cpu": {"load_average": [1.0, 9.0, 9.0], "usable": 2.0}}}, []),  # a CPU is left, the client's own
        ({"before": {"cpu": {"load_average": [9.0, 1.0, 1.0], "usable": 8.0}},
          "nodes": {"n1": {"cpu": {"load_average": [9.0, 1.0, 1.0], "usable": 8.0}},
                    "n2": {"cpu": {"load_average": [0.1, 0.1, 0.1], "usable": 8.0}}}},
         ["others were using `n1`: load average 9.0 on 8 CPUs before anything started"]),
        ({"before": {"cpu": {}}}, []),
        ({"before": {"cpu": {"load_average": "edited", "usable": None}}}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_stored_facts_say_whether_others_used_the_machine(noted: dict[str, Any], said: list[str]) -> None:
    assert facts.busy_before(noted) == said


def test_waiting_ends_when_the_port_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run.preflight._LOOK_S", 0.05)
    server = socket.create_server(("127.0.0.1", 0))
    need = Need(tmp_path, port=server.getsockname()[1])
    waited: list[str] = []

    def on_wait(troubles: object) -> None:
        waited.append(str(troubles[0]))
        server.close()

    troubles = preflight.wait_free(need, 60.0, on_wait)
    assert [one for one in troubles if one.subject.startswith("port")] == []
    assert len(waited) == 1


def test_waiting_does_not_wait_for_what_does_not_pass(tmp_path: Path) -> None:
    never = threading.Event()
    troubles = preflight.wait_free(Need(tmp_path, model=tmp_path / "none"), 600.0, lambda _: never.set())
    assert any(one.subject == "model" for one in troubles)
    assert not never.is_set()


def safetensors(path: Path, *, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    data = struct.pack("<Q", len(header)) + header + b"\0" * 16
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        safetensors(folder / name)
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_whole_model_folder_has_no_faults(model: Path) -> None:
    assert modelfiles.faults(model) == []


def test_every_fault_of_a_model_folder_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model-00001-of-00002.safetensors").unlink()
    safetensors(model / "model-00002-of-00002.safetensors", cut=3)
    size = (model / "model-00002-of-00002.safetensors").stat().st_size
    assert modelfiles.faults(model) == [
        f"`{model}` has no tokenizer: none of tokenizer.json, tokenizer.model, tiktoken.model, vocab.json, "
        "tekken.json, spiece.model",
        f"`{model}/model-00001-of-00002.safetensors` is named by the weight index and missing",
        f"`{model}/model-00002-of-00002.safetensors` has {size} bytes, its header promises {size + 3}",
    ]


def test_a_git_lfs_pointer_is_not_a_weight_file(model: Path) -> None:
    pointer = model / "model-00001-of-00002.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    [message] = modelfiles.faults(model)
    assert message.startswith(f"`{pointer}` has no safetensors header (a Git LFS pointer, or torn)")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), None),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "is GGUF of version 9, 2 or 3 were expected"),
        (b"<!DOCTYPE html><html><body>", "is not GGUF: it starts with b'<!DO'"),
        (b"GG", "is not GGUF: it starts with b'GG'"),
    ],
)
def test_a_gguf_file_is_known_by_its_magic(tmp_path: Path, data: bytes, message: str | None) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert modelfiles.faults(path) == ([f"`{path}` {message}"] if message else [])


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    for part in (1, 3):
        (tmp_path / f"m-{part:05d}-of-00003.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert modelfiles.faults(tmp_path / "m-00001-of-00003.gguf") == [
        f"`{tmp_path}/m-00002-of-00003.gguf` is missing: the model has 3 parts"
    ]


def test_the_hardware_class_counts_gpus_and_names_the_cpu() -> None:
    cpu = {"model": "EPYC 9554", "usable": 128.0}
    one = {"cpu": cpu, "gpu": {"devices": [{"name": "RTX PRO 6000"}] * 8, "driver": "580"}}
    assert facts.hardware_class(one) == "8 x RTX PRO 6000; EPYC 9554 x 128.0"
    assert facts.hardware_class({"cpu": cpu, "gpu": "no GPU"}) == "no GPU; EPYC 9554 x 128.0"


def test_the_facts_of_this_machine_are_json_and_name_what_runs_here() -> None:
    known = json.loads(json.dumps(facts.collect()))
    assert known["system"]["kernel"] == " ".join([os.uname().sysname, os.uname().release, os.uname().machine])
    assert known["cpu"]["usable"] > 0
    # The eighth number of the first line of /proc/stat, in ticks (proc(5)).
    stolen = int(Path("/proc/stat").read_text().splitlines()[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    assert known["cpu"]["stolen_s"] == pytest.approx(stolen, abs=60)
    assert facts.comparable(known)["kernel"] == known["system"]["kernel"]
    assert facts.comparable({}) == {}


def test_the_git_state_notes_uncommitted_files(tmp_path: Path) -> None:
    assert facts.git_state(tmp_path) is None
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        assert facts._git(tmp_path, *words) is not None
    assert facts.git_state(tmp_path)["dirty"] is False
    (tmp_path / "new").touch()
    state = facts.git_state(tmp_path)
    assert (len(state["commit"]), state["dirty"], state["changed"]) == (40, True, 1)
