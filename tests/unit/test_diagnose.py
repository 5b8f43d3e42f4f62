"""Samples are lines as the projects' own issue trackers show them (the number is beside each), or as a real server of
that version wrote them; what they mean is what those threads found out."""

import re

import pytest

from harness.engines.engine import Signature
from harness.run import diagnose
from harness.run.diagnose import Death
from harness.run.logs import LogLine, parse
from harness.run.signatures import GENERIC, HANGS

SAMPLES = {
    # sglang#29317: reported as a missing architecture, was a kernel wheel beside another torch
    "ImportError: common_ops.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib": "kernel built for another torch",
    "ImportError: /x/y.so: undefined symbol: _ZNK3c105Error4whatEv": "kernel built for another torch",
    "ImportError: flash_attn_2_cuda.so: undefined symbol: cublasLtMatmul_v9": "undefined symbol",
    # sglang#10951
    "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory": "library of another CUDA",
    "OSError: libnuma.so.1: cannot open shared object file: No such file or directory": "shared library missing",
    # pytorch#150733
    "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.": (
        "torch without this architecture"
    ),
    "Found GPU0 NVIDIA RTX PRO 6000 which is of compute capability (CC) 12.0.": "torch without this architecture",
    # sglang#7249, vllm#19906
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "no kernel image",
    # sglang#15650
    "RuntimeError: No supported CUDA architectures found for major versions [9, 10].": (
        "all-reduce fusion without this architecture"
    ),
    # flashinfer#3674
    "RuntimeError: No supported CUDA architectures found for major versions [12].": "nvcc too old for this GPU",
    "RuntimeError: FlashInfer requires GPUs with sm75 or higher": "nvcc too old for this GPU",
    # sglang#24633
    "InternalError: TllmGenFmhaRunner: Unsupported architecture": "attention kernel without this architecture",
    # sglang#26087
    "RuntimeError: Assertion error (csrc/apis/attention.hpp:213): Unsupported architecture": (
        "DeepGEMM without this architecture"
    ),
    "AttributeError: 'ImportError' object has no attribute 'get_num_sms'": "DeepGEMM without this architecture",
    # triton#8539
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'": "ptxas too old",
    # flashinfer#2708
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": "not a probability",
    "KeyError: 12": "symmetric memory table",
    # sglang#30364
    "RuntimeError: multicast operations are not supported": "no multicast",
    # vllm#17939
    "(VllmWorker rank=0 pid=2445155) ERROR 05-10 16:00:15 [multiproc_executor.py:470] RuntimeError: CUDA out of memory "
    "occurred when warming up sampler with 256 dummy requests.": "CUDA out of memory",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "CUDA out of memory",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "illegal memory access",
    "[rank3]:[E ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)": (
        "NCCL timeout"
    ),
    "ncclUnhandledCudaError: Call to CUDA function failed.": "NCCL error",
    # read on real servers of these versions
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8301): address already in use": (
        "port in use"
    ),
    "E srv  llama_server: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8101": "port in use",
    "error: invalid argument: --bogus-flag": "bad flag",
    "vllm: error: unrecognized arguments: --bogus-flag 1": "bad flag",
    "huggingface_hub.errors.HFValidationError: Repo id must use alphanumeric chars or '-', '_', '.'": "model not found",
    "OSError: Can't load tokenizer for '/models/x'. If you were trying to load it": "tokenizer missing",
    "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer": "weights incomplete",
    "[2026-01-01 10:00:00] Received sigquit from a child process. It usually means the child failed.": (
        "child process failed"
    ),
    # vllm#27508
    "(APIServer pid=223598) RuntimeError: Engine core initialization failed. See root cause above.": (
        "child process failed"
    ),
    # sglang srt/utils/watchdog.py, torch/utils/file_baton.py, torch/cuda/__init__.py
    "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)": "watchdog",
    'Waited on lock file "/root/.cache/torch_extensions/py312_cu130/x/lock" for 300 seconds.': "stale JIT lock",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).": "driver too old",
    "RuntimeError: No CUDA GPUs are available": "no GPU",
    "ModuleNotFoundError: No module named 'sgl_kernel'": "package missing",
    # nccl#290
    "gpu01:52:52 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-Y2Bd to 9637892 bytes": "shared memory full",
    "RuntimeError: Unsupported architecture": "unsupported architecture",
    "OSError: [Errno 24] Too many open files": "too many open files",
    "OSError: [Errno 28] No space left on device": "disk full",
    "[sgl_kernel] CRITICAL: Could not load any common_ops library!": "kernels did not load",
    "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:43210": (
        "another rank went"
    ),
    # sglang 0.5.23 with two ranks, of which the other was killed
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:59521: Connection reset by peer. This is typically caused by a remote worker hanging": (
        "another rank went"
    ),
}

HEALTHY = [
    "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
    # vllm#25837: a start that went well talks of running out of memory
    "If out-of-memory error occurs during cudagraph capture, consider decreasing `gpu_memory_utilization` or switching "
    "to eager mode.",
    "server_args=ServerArgs(model_path='m', watchdog_timeout=300, dist_timeout=None, api_key=None)",
    "[2026-01-01 10:00:00 TP0] Load weight end. type=KimiK25ForConditionalGeneration, dtype=torch.bfloat16",
    "[2026-01-01 10:00:00] The server is fired up and ready to roll!",
    "I srv  llama_server: listening on http://127.0.0.1:8101",
    "INFO:     Application startup complete.",
    "NCCL INFO comm 0x55 rank 0 nranks 8 - Init COMPLETE",
]


def lines(*texts: str, writer: str = "100") -> list[LogLine]:
    return [LogLine(f"2026-01-01T10:00:{n:02d}.000000Z", writer, text) for n, text in enumerate(texts)]


def explain(log: list[LogLine], code: int | None = 1, **more: object) -> diagnose.Diagnosis:
    return diagnose.explain(log, (), Death(code, more.pop("phase", "start"), **more))


@pytest.mark.parametrize(("line", "name"), SAMPLES.items())
def test_a_known_line_is_known_by_its_class(line: str, name: str) -> None:
    found = explain(lines("starting", line))
    assert (found.name, found.known) == (name, True)
    assert any(line in shown for shown in found.evidence)
    assert found.of_a_peer == (name == "another rank went")
    assert found.remedy


def test_every_generic_signature_has_a_sample() -> None:
    assert {signature.name for signature in GENERIC} == set(SAMPLES.values())
    for signature in HANGS:
        re.compile(signature.regex)


@pytest.mark.parametrize("line", HEALTHY)
def test_a_line_of_a_healthy_server_never_ends_the_wait(line: str) -> None:
    assert diagnose.decisive(lines(line), GENERIC) is None


def test_a_decisive_line_is_noticed_and_the_reapers_own_lines_are_not() -> None:
    fatal = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    assert diagnose.decisive(lines("fine", fatal), GENERIC).name == "no kernel image"
    assert diagnose.decisive(lines(fatal, writer="reaper"), GENERIC) is None


def test_the_root_is_named_before_the_wrapper_and_the_wrapper_is_mentioned() -> None:
    found = explain(
        lines(
            "[sgl_kernel] CRITICAL: Could not load any common_ops library!",
            "ImportError: common_ops.abi3.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib",
            "Received sigquit from a child process. It usually means the child failed.",
        ),
        -9,
    )
    assert found.name == "kernel built for another torch"
    assert found.also == ("undefined symbol", "child process failed", "kernels did not load")
    assert found.exit_code == -9


def test_the_engines_own_signatures_come_first() -> None:
    own = Signature("speculation tree too wide", r"tree size", "fewer draft tokens")
    log = lines("ValueError: tree size 40 > 21", "OSError: [Errno 28] No space left on device")
    assert diagnose.explain(log, (own,), Death(1, "start")).name == "speculation tree too wide"


def test_a_cause_near_the_death_is_preferred_to_an_old_complaint() -> None:
    log = lines(
        "optional kernel skipped: undefined symbol: foo", *["decoding"] * 500, "OSError: [Errno 28] No space left"
    )
    assert explain(log).name == "disk full"


def test_an_unknown_death_shows_the_last_lines_of_the_process_that_raised_the_alarm() -> None:
    worker = lines("Traceback (most recent call last):", "  in forward", "ValueError: shapes 3 and 4", writer="200")
    api = lines("GET /health 200 OK", "GET /health 200 OK")
    found = explain([*worker, *api], 1)
    assert (found.name, found.known) == ("unknown (ended with 1)", False)
    assert found.evidence == (
        "10:00:00.000 [200] Traceback (most recent call last):",
        "10:00:01.000 [200]   in forward",
        "10:00:02.000 [200] ValueError: shapes 3 and 4",
    )


@pytest.mark.parametrize(
    ("code", "kills", "name", "known"),
    [
        (-9, 0, "unknown (ended by SIGKILL)", False),
        (-9, 1, "killed by the kernel: out of memory", True),
        (-11, 0, "unknown (ended by SIGSEGV)", False),
        (-11, 1, "unknown (ended by SIGSEGV)", False),
        (7, 0, "unknown (ended with 7)", False),
        (None, 0, "unknown (a child process crashed)", False),
    ],
)
def test_a_silent_death_is_told_by_how_it_ended(code: int | None, kills: int, name: str, known: bool) -> None:
    found = explain(lines("all is well"), code, oom_kills=kills)
    assert (found.name, found.known) == (name, known)


@pytest.mark.parametrize(
    ("last", "name"),
    [
        ("Init torch distributed begin.", "NCCL hang"),
        ("gpu01:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "NCCL hang"),
        ("[TP0] Capture cuda graph begin. This can take up to several minutes.", "hung in graph capture"),
        ("Loading safetensors checkpoint shards:  12% Completed | 8/64", "still loading weights"),
        ("thinking", "not ready after 60 s"),
    ],
)
def test_a_server_that_never_comes_up_is_judged_by_what_it_was_last_busy_with(last: str, name: str) -> None:
    found = diagnose.hung(lines("server_args=ServerArgs(...)", last), Death(None, "start"), 60.0)
    assert found.name == name
    assert last in found.evidence[-1]


def test_exit_137_after_a_stop_is_clean_unless_the_log_shows_a_crash_before_it() -> None:
    asked = LogLine("2026-01-01T10:01:00.000000Z", "reaper", "SIGTERM to 100")
    drained = lines("Gracefully exiting... Remaining number of requests 0")
    crashed = lines("Scheduler hit an exception: Traceback", "SIGQUIT received. One child failed.")
    assert diagnose.clean_stop(-9, [*lines("serving"), asked, *drained])
    assert not diagnose.clean_stop(-9, [*crashed, asked])
    assert not diagnose.clean_stop(-9, lines("serving"))
    assert diagnose.clean_stop(0, [])
    assert diagnose.clean_stop(-15, [])


def test_a_stored_line_reads_back_and_a_torn_one_is_left_out() -> None:
    line = parse(b"2026-01-01T10:00:00.123456Z [77] text with [brackets] and \xff")
    assert line == LogLine("2026-01-01T10:00:00.123456Z", "77", "text with [brackets] and \\xff")
    assert str(line) == "10:00:00.123 [77] text with [brackets] and \\xff"
    assert parse(b"2026-01-01T10:00:0") is None
