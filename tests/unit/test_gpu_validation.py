"""The checks that need a GPU, run against a PyTorch of ours that fails in chosen ways.

What a hang, a crash, garbage and a wrong answer look like, and that nothing is left running. Real GPUs: `tests/gpu`.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from harness.env import validate
from harness.env.validate import CHECKS, IMPORTS, Report, Result, Subject, choose
from harness.errors import InputError

STUB = Path(__file__).parents[1] / "fakes" / "gpu"
EVERYTHING = frozenset({"torch", "triton", "sglang-kernel", "flashinfer-python"})


def subject(python: Path = Path(sys.executable), **variables: str) -> Subject:
    """An environment whose PyTorch is the stand-in, on two GPUs of its invention."""
    return Subject(
        label="here",
        env_id=None,
        python=python,
        variables={"PYTHONPATH": str(STUB), "PATH": f"{STUB / 'bin'}:{os.environ['PATH']}", **variables},
        distributions=EVERYTHING,
        devices=(120,),
        driver_floor="580",
    )


def result(name: str, deadline_s: float = 60, **variables: str) -> Result:
    (found,) = validate.run(subject(**variables), choose([name]), deadline_s=deadline_s).results
    return found


def test_a_sound_machine_passes_every_check() -> None:
    report = validate.run(subject(), deadline_s=120)

    assert {item.check: (item.state, item.message) for item in report.results if item.state != "ok"} == {}
    assert [item.check for item in report.results] == [check.name for check in CHECKS]
    assert report.passed
    told: Mapping[str, Result] = {item.check: item for item in report.results}
    assert told["devices"].message == "2 x Stand-in GPU (sm_120)"
    assert told["all-reduce"].facts["transports"] == {"SHM/direct/direct": 4}
    assert set(told["all-reduce"].facts["microseconds"]) == {"4 KiB", "64 KiB", "1 MiB"}
    assert told["peer-access"].facts["access"] == [[True, False], [False, True]]
    assert told["symmetric-memory"].facts["multicast_pointer"] == 0
    assert "without multicast (pointer 0)" in told["symmetric-memory"].message
    assert told["driver"].facts == {"driver": "580.95.05", "floor": "580"}


def test_without_a_gpu_the_first_check_says_so_and_the_rest_is_not_run() -> None:
    report = validate.run(subject(STUB_GPUS="0"))

    assert not report.gpu and not report.passed
    first, *rest = report.results
    assert (first.state, first.message) == ("fail", "no GPU on this machine: PyTorch sees no GPU")
    assert {(item.state, item.message) for item in rest} == {("not run", "there is no GPU")}


@pytest.mark.parametrize(
    ("check", "fault", "message"),
    [
        ("devices", "capability=9.0", "GPU 0 is sm_90, GPU 1 is sm_90; the environment is for sm_120"),
        ("arch-list", "arch_list=sm_80 sm_90", "PyTorch 2.14.1+stub lists sm_80 sm_90 and nothing for sm_120"),
        ("torch-kernel", "wrong=add", "GPU 0 adds wrongly"),
        ("sgl-kernel", "wrong=rmsnorm", "rmsnorm is off by 1"),
        ("triton", "wrong=triton", "the kernel was compiled and adds wrongly"),
        ("flashinfer-jit", "wrong=sampling", "top-1 sampling does not choose the most probable token"),
        ("peer-access", "wrong=copy", "bytes copied from GPU 0 to GPU 1 arrive changed"),
        ("all-reduce", "wrong=all_reduce", "the sum of 4 KiB over 2 GPUs is wrong"),
        ("symmetric-memory", "raise=rendezvous", "RuntimeError: CUDASymmetricMemoryAllocator::rendezvous: no access"),
        (
            "torch-kernel",
            "raise=add",
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        ("driver", "driver=575.57.08", "driver 575.57.08 is older than 580"),
        ("sgl-kernel", "absent=sgl_kernel", "ModuleNotFoundError: No module named 'sgl_kernel'"),
    ],
)
def test_a_wrong_answer_fails_with_what_was_seen_and_a_remedy(check: str, fault: str, message: str) -> None:
    found = result(check, STUB_FAULT=fault)

    assert found.state == "fail"
    assert found.message.startswith(message)
    assert found.remedy


def test_a_hang_is_a_result_and_leaves_nothing_behind(tmp_path: Path) -> None:

    found = result("all-reduce", deadline_s=15, STUB_FAULT="hang=all_reduce", STUB_PIDS=str(tmp_path))

    assert (found.state, found.message) == ("hang", "no answer within 15 s; it was ended")
    assert "NCCL_P2P_DISABLE=1" in (found.remedy or "")
    assert any("entering all_reduce" in line for line in found.evidence)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    assert not any(_runs(pid) for pid in ranks)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_will_not_stop_is_made_to() -> None:
    found = result("torch-kernel", deadline_s=4, STUB_FAULT="hang=add", STUB_STUBBORN="1")

    assert found.state == "hang"


def test_a_crash_is_told_by_its_signal_with_the_end_of_its_output() -> None:
    found = result("torch-kernel", STUB_FAULT="crash=add")

    assert (found.state, found.message) == ("crash", "ended by SIGSEGV without an answer")
    assert any("about to crash" in line for line in found.evidence)


def test_an_early_exit_is_a_crash_with_its_code() -> None:
    found = result("torch-kernel", STUB_FAULT="exit=add")

    assert (found.state, found.message) == ("crash", "ended by exit code 3 without an answer")


def test_a_rank_that_dies_is_named() -> None:
    found = result("all-reduce", STUB_FAULT="crash=all_reduce")

    assert found.state == "fail"
    assert "rank 0 ended with code -11 and no answer" in found.message


def test_noise_on_stdout_is_not_taken_for_the_answer() -> None:
    assert result("devices", STUB_FAULT="noise=1").state == "ok"


@pytest.mark.parametrize("answer", ["", "{", "[]", '{"ok": "yes", "message": 1}', "\x00\xff"])
def test_an_answer_that_is_not_one_is_garbled(answer: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%b' {_quoted(answer)} > \"$4\"\n")
    python.chmod(0o755)

    (found,) = validate.run(subject(python), choose(["devices"])).results

    assert found.state == "garbled"
    assert found.message.startswith("its answer cannot be understood: ")


def _quoted(text: str) -> str:
    return "'" + "".join(f"\\{ord(letter):04o}" if not 32 <= ord(letter) < 127 else letter for letter in text) + "'"


def test_a_check_of_what_is_not_in_the_environment_is_not_run() -> None:
    here = subject()
    bare = Subject(here.label, None, here.python, here.variables, frozenset({"torch"}), (120,))

    report = validate.run(bare, choose(["devices", "sgl-kernel", "triton"]))

    assert [item.state for item in report.results] == ["ok", "not run", "not run"]
    assert report.results[1].message == "the environment has no sgl-kernel or sglang-kernel"
    assert report.passed


def test_imports_names_what_cannot_be_imported() -> None:
    packaging = Subject("here", None, Path(sys.executable), {}, frozenset({"packaging", "pyyaml-not-there"}))
    assert validate.run(packaging, (IMPORTS,)).results[0].message == "imported packaging"


def test_an_interpreter_that_is_gone_is_named() -> None:
    with pytest.raises(InputError, match="cannot run `/gone/python`: No such file or directory"):
        validate.run(subject(Path("/gone/python")), choose(["devices"]))


def test_a_misspelt_check_gets_a_suggestion() -> None:
    with pytest.raises(InputError) as caught:
        choose(["all-reduced"])
    assert str(caught.value) == "there is no GPU check `all-reduced`\n\nhint: did you mean `all-reduce`?"


def test_a_report_survives_as_json() -> None:
    report = validate.run(subject(STUB_GPUS="0"), choose(["devices"]))

    assert Report.model_validate_json(report.model_dump_json()) == report
