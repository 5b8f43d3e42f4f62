"""What the project's rules say, one by one: a stack on which the fact bites, and the nearest one on which it does not.

Versions, flags and outcomes here are those of the facts' sources (released wheels and public threads, named in each
rule's `source`), not of our own code.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.env import rules
from harness.env.rules import Context

FOLDER = Path(__file__).parents[2] / "envspecs/rules"
RULES = {rule.id: rule for rule in rules.load_all(FOLDER)}

# A box of eight RTX PRO 6000 about which everything is known, running nothing in particular.
BOX = Context(
    packages={},
    patches=(),
    cuda="13.0.1",
    nvcc="13.0",
    driver="580.95.05",
    architectures=("sm_120a",),
    topology="pcie",
    engine="sglang",
    args={},
    variables={},
    model="kimi-k2.5-int4",
)


def sglang(version: str, **more: str) -> dict[str, str]:
    return {"sglang": version, **{name.replace("_", "-"): value for name, value in more.items()}}


EAGLE3 = {"speculative-algorithm": "EAGLE3"}
TREE = {**EAGLE3, "speculative-num-steps": 2, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 16}
FUSION = {"enable-flashinfer-allreduce-fusion": True}
SYMMETRIC = {"enable-torch-symm-mem": True}
IPC = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
NEWEST = sglang("0.5.23", flashinfer_python="0.7.2")

# rule id, severity, facts with which it fires, what to change so that it does not
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # packages
    (
        "flashinfer-parts-equal",
        "error",
        {"packages": {"flashinfer-python": "0.6.8.post1", "flashinfer-jit-cache": "0.6.8+cu130"}},
        {"packages": {"flashinfer-python": "0.6.8.post1", "flashinfer-jit-cache": "0.6.8.post1+cu130"}},
    ),
    (
        "kernel-packages-exclude-each-other",
        "error",
        {"packages": {"sgl-kernel": "0.3.21", "sglang-kernel": "0.4.0"}},
        {"packages": {"sglang-kernel": "0.4.0"}},
    ),
    (
        "sglang-wants-the-other-kernel-package",
        "error",
        {"packages": sglang("0.5.10.post1", sgl_kernel="0.3.21")},
        {"packages": sglang("0.5.9", sgl_kernel="0.3.21")},
    ),
    (
        "sglang-wants-the-other-kernel-package",
        "error",
        {"packages": sglang("0.5.9", sglang_kernel="0.4.1")},
        {"packages": sglang("0.5.10rc0", sglang_kernel="0.4.0")},
    ),
    (
        "kernel-built-for-another-torch",
        "error",
        {"packages": {"sgl-kernel": "0.3.21+cu130", "torch": "2.14.1"}},
        {"packages": {"sgl-kernel": "0.3.21+cu130", "torch": "2.9.1+cu130"}},
    ),
    (
        "kernel-built-for-another-torch",
        "error",
        {"packages": {"sglang-kernel": "0.4.10", "torch": "2.11.0"}},
        {"packages": {"sglang-kernel": "0.4.10", "torch": "2.14.1"}},
    ),
    (
        "kernel-built-for-another-torch",
        "error",
        {"packages": {"sglang-kernel": "0.4.1.post1", "torch": "2.11.0"}},
        {"packages": {"sglang-kernel": "0.4.2", "torch": "2.11.0"}},
    ),
    (
        "old-kernel-links-cuda-12",
        "error",
        {"packages": {"sgl-kernel": "0.3.21"}},
        {"packages": {"sgl-kernel": "0.3.21+cu130"}},
    ),
    (
        "old-kernel-links-cuda-12",
        "error",
        {"packages": {"sglang-kernel": "0.4.1.post1"}},
        {"packages": {"sglang-kernel": "0.4.2"}},
    ),
    ("new-kernel-links-cuda-13", "error", {"packages": {"sglang-kernel": "0.4.2"}, "cuda": "12.8"}, {"cuda": "13.0.1"}),
    (
        "sglang-has-no-cuda-12-lane",
        "error",
        {"packages": sglang("0.5.20"), "cuda": "12.9"},
        {"packages": sglang("0.5.19")},
    ),
    (
        "two-cuda-majors-installed",
        "warning",
        {"packages": {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.28.9"}},
        {"packages": {"nvidia-nccl-cu13": "2.28.9"}},
    ),
    (
        "kernel-needs-libnuma",
        "warning",
        {"packages": {"sglang-kernel": "0.4.2"}},
        {"packages": {"sglang-kernel": "0.4.10"}},
    ),
    (
        "kernel-has-no-code-for-sm121",
        "error",
        {"packages": {"sglang-kernel": "0.4.10"}, "architectures": ("sm_121",)},
        {"architectures": ("sm_120a",)},
    ),
    (
        "fp4-gemm-cudnn-too-old",
        "error",
        {"packages": {"nvidia-cudnn-cu13": "9.13.0.50"}, "args": {"fp4-gemm-backend": "flashinfer_cudnn"}},
        {"packages": {"nvidia-cudnn-cu13": "9.15.1.9"}},
    ),
    # compilers and drivers
    (
        "nvcc-floor-flashinfer-sm12x",
        "error",
        {"packages": {"flashinfer-python": "0.6.7"}, "nvcc": "12.8"},
        {"packages": {"flashinfer-python": "0.6.6"}},
    ),
    (
        "nvcc-floor-flashinfer-sm12x",
        "error",
        {"packages": {"flashinfer-python": "0.7.0.post1"}, "nvcc": "12.8"},
        {"packages": {"flashinfer-python": "0.7.1"}},
    ),
    (
        "nvcc-floor-flashinfer-sm12x",
        "error",
        {"packages": {"flashinfer-python": "0.6.18"}, "nvcc": "12.8"},
        {"nvcc": "12.9"},
    ),
    (
        "nvcc-floor-flashinfer-sm121",
        "error",
        {"packages": {"flashinfer-python": "0.7.1"}, "nvcc": "12.8", "architectures": ("sm_121a",)},
        {"architectures": ("sm_120a",)},
    ),
    ("nvcc-knows-no-sm120", "error", {"nvcc": "12.6"}, {"nvcc": "12.8"}),
    (
        "nvcc-knows-no-family-target",
        "error",
        {"nvcc": "12.8", "architectures": ("sm_120f",)},
        {"architectures": ("sm_120a",)},
    ),
    (
        "nvcc-major-differs-from-torch",
        "error",
        {"packages": {"torch": "2.9.1"}},  # PyPI's 2.9.1 is +cu128
        {"packages": {"torch": "2.9.1+cu130"}},
    ),
    (
        "nvcc-major-differs-from-torch",
        "error",
        {"packages": {"torch": "2.11.0"}, "nvcc": "12.8"},  # PyPI's 2.11.0 is +cu130
        {"packages": {"torch": "2.10.0"}},
    ),
    ("nvcc-major-differs-from-torch", "error", {"packages": {"torch": "2.9.1+cu128"}}, {"nvcc": "12.9"}),
    ("driver-floor-cuda-13", "error", {"driver": "575.57.08"}, {"driver": "580.65.06"}),
    ("driver-floor-cuda-12", "error", {"driver": "520.61.05", "cuda": "12.8.1"}, {"driver": "570.86.15"}),
    # NCCL
    (
        "nccl-symmetric-memory-race",
        "wrong answers",
        {"packages": {"nvidia-nccl-cu13": "2.29.7"}, "args": {"enable-symm-mem": True, "dcp-size": 4}},
        {"packages": {"nvidia-nccl-cu13": "2.30.7"}},
    ),
    (
        "nccl-symmetric-memory-race",
        "wrong answers",
        {"packages": {"nvidia-nccl-cu13": "2.28.9"}, "args": {"enable-symm-mem": True, "dcp-size": 4}},
        {"args": {"enable-symm-mem": True, "dcp-size": 1}},
    ),
    ("nccl-underrates-pcie", "slow", {"packages": {"nvidia-nccl-cu12": "2.27.5"}}, {"variables": {"NCCL_PROTO": "LL"}}),
    (
        "nccl-underrates-pcie",
        "slow",
        {"packages": {"nvidia-nccl-cu13": "2.28.9"}},
        {"packages": {"nvidia-nccl-cu13": "2.29.7"}},
    ),
    ("p2p-disabled", "slow", {"variables": {"NCCL_P2P_DISABLE": "1"}}, {"variables": {"NCCL_P2P_DISABLE": "0"}}),
    (
        "p2p-across-sockets",
        "warning",
        {"topology": "pcie", "variables": {"NCCL_P2P_LEVEL": "SYS"}},
        {"topology": "pcie", "variables": {"NCCL_P2P_LEVEL": "PHB"}},
    ),
    # variables
    (
        "kernel-version-check-bypassed",
        "error",
        {"variables": {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}},
        {"variables": {}},
    ),
    (
        "flashinfer-version-check-bypassed",
        "error",
        {"variables": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}},
        {"variables": {}},
    ),
    (
        "cudnn-check-bypassed",
        "warning",
        {"packages": sglang("0.5.9"), "variables": {"SGLANG_DISABLE_CUDNN_CHECK": "1"}},
        {"packages": sglang("0.5.10")},
    ),
    (
        "expandable-segments-break-ipc",
        "warning",
        {"variables": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}},
        {"variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}},
    ),
    (
        "device-max-connections-overwritten",
        "no-op",
        {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}},
    ),
    (
        "triton-ignores-ptxas-path",
        "no-op",
        {"packages": {"triton": "3.6.0"}, "variables": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"}},
        {"packages": {"triton": "3.5.1"}},
    ),
    (
        "triton-has-no-blackwell-path",
        "no-op",
        {"packages": {"triton": "3.5.1"}, "variables": {"TRITON_PTXAS_BLACKWELL_PATH": "/usr/local/cuda/bin/ptxas"}},
        {"packages": {"triton": "3.6.0"}},
    ),
    (
        "triton-ptxas-too-old",
        "error",
        {"packages": {"triton": "3.5.1"}, "architectures": ("sm_121a",)},
        {"variables": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"}},
    ),
    (
        "triton-ptxas-too-old",
        "error",
        {"packages": {"triton": "3.5.1"}, "architectures": ("sm_120f",)},
        {"architectures": ("sm_120a",)},
    ),
    (
        "torch-arch-list-has-no-family-target",
        "error",
        {"packages": {"torch": "2.14.1"}, "variables": {"TORCH_CUDA_ARCH_LIST": "12.0f"}},
        {"variables": {"TORCH_CUDA_ARCH_LIST": "12.0a"}},
    ),
    (
        "flashinfer-arch-list-form",
        "error",
        {"packages": {"flashinfer-python": "0.7.2"}, "variables": {"FLASHINFER_CUDA_ARCH_LIST": "9.0a,12.0a"}},
        {"variables": {"FLASHINFER_CUDA_ARCH_LIST": "9.0a 12.0a"}},
    ),
    (
        "flashinfer-arch-list-form",
        "error",
        {"packages": {"flashinfer-python": "0.6.3"}, "variables": {"FLASHINFER_CUDA_ARCH_LIST": "120a"}},
        {"variables": {"FLASHINFER_CUDA_ARCH_LIST": "12.0a"}},
    ),
    (
        "flashinfer-ignores-family-suffix",
        "no-op",
        {"packages": {"flashinfer-python": "0.6.6"}, "variables": {"FLASHINFER_CUDA_ARCH_LIST": "12.0f"}},
        {"packages": {"flashinfer-python": "0.6.7"}},
    ),
    # all-reduce
    (
        "allreduce-fusion-crashes-sm120",
        "error",
        {"packages": sglang("0.5.7"), "args": FUSION},
        {"architectures": ("sm_100a",)},
    ),
    (
        "allreduce-fusion-silent-on-sm120",
        "no-op",
        {"packages": sglang("0.5.9"), "args": FUSION},
        {"architectures": ("sm_90a",)},
    ),
    (
        "allreduce-fusion-silent-on-sm120",
        "no-op",
        {"packages": sglang("0.5.12.post1"), "args": FUSION},
        {"packages": sglang("0.5.14")},
    ),
    (
        "allreduce-fusion-unread-in-0.5.13",
        "warning",
        {"packages": sglang("0.5.13.post1"), "args": FUSION},
        {"args": {}},
    ),
    (
        "allreduce-fusion-stops-start-on-sm120",
        "error",
        {"packages": sglang("0.5.23"), "args": {"flashinfer-allreduce-fusion-backend": "auto"}},
        {"args": {}},
    ),
    (
        "allreduce-fusion-stops-start-on-sm120",
        "error",
        {"packages": sglang("0.5.23"), "args": FUSION},
        {"args": {**FUSION, "enforce-disable-flashinfer-allreduce-fusion": True}},
    ),
    (
        "allreduce-fusion-stops-start-on-sm120",
        "error",
        {"packages": sglang("0.5.14"), "args": FUSION},
        {"packages": sglang("0.5.12.post1")},
    ),
    (
        "torch-symm-mem-has-no-multicast-on-pcie",
        "no-op",
        {"packages": sglang("0.5.9"), "args": SYMMETRIC},
        {"topology": "nvlink"},
    ),
    (
        "torch-symm-mem-has-no-multicast-on-pcie",
        "no-op",
        {"packages": sglang("0.5.9"), "args": SYMMETRIC, "patches": ("sm120-symm-mem-tables",)},
        {"patches": ("sm120-symm-mem-tables-0.5.23", "sm120-symm-mem-two-shot")},
    ),
    (
        "torch-symm-mem-has-no-sm120-row",
        "error",
        {"packages": sglang("0.5.11"), "args": SYMMETRIC},
        {"patches": ("sm120-symm-mem-tables",)},
    ),
    (
        "torch-symm-mem-stays-off-on-sm120",
        "no-op",
        {"packages": sglang("0.5.12.post1"), "args": SYMMETRIC},
        {"packages": sglang("0.5.11")},
    ),
    (
        "torch-symm-mem-loses-in-place-results",
        "wrong answers",
        {"packages": sglang("0.5.9"), "args": SYMMETRIC, "topology": "nvlink", "architectures": ("sm_90a",)},
        {"packages": sglang("0.5.23")},
    ),
    (
        "custom-allreduce-flag-on-pcie",
        "no-op",
        {"args": {"tp": 8, "disable-custom-all-reduce": True}},
        {"topology": "nvlink"},
    ),
    (
        "custom-allreduce-flag-on-pcie",
        "no-op",
        {"args": {"tp-size": 4, "disable-custom-all-reduce": True}},
        {"args": {"tp-size": 2, "disable-custom-all-reduce": True}},
    ),
    ("pcie-ipc-allreduce-not-used", "slow", {"packages": NEWEST, "args": {"tp": 8}}, {"variables": IPC}),
    ("pcie-ipc-allreduce-not-used", "slow", {"packages": NEWEST, "args": {"tp": 8}}, {"topology": "nvlink"}),
    (
        "pcie-ipc-allreduce-needs-newer-packages",
        "no-op",
        {"packages": sglang("0.5.21", flashinfer_python="0.6.18"), "variables": IPC},
        {"packages": sglang("0.5.22", flashinfer_python="0.7.1")},
    ),
    (
        "pcie-ipc-allreduce-world-size",
        "no-op",
        {"packages": NEWEST, "variables": IPC, "args": {"tp": 6}},
        {"args": {"tp": 8}},
    ),
    (
        "pcie-ipc-allreduce-dtype",
        "no-op",
        {"variables": IPC, "args": {"dtype": "float16"}},
        {"args": {"dtype": "bfloat16"}},
    ),
    (
        "pcie-ipc-allreduce-deterministic",
        "no-op",
        {"variables": IPC, "args": {"enable-deterministic-inference": True}},
        {"variables": {}},
    ),
    (
        "vllm-symm-mem-has-no-sm120-row",
        "no-op",
        {"engine": "vllm", "packages": {"vllm": "0.33.0"}, "variables": {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}},
        {"architectures": ("sm_100a",)},
    ),
    (
        "vllm-pcie-ipc-allreduce-not-used",
        "slow",
        {
            "engine": "vllm",
            "packages": {"vllm": "0.33.0", "flashinfer-python": "0.7.0.post1"},
            "args": {"tensor-parallel-size": 8},
        },
        {"variables": {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}},
    ),
    # speculation
    (
        "tree-verified-with-a-causal-mask",
        "wrong answers",
        {"packages": sglang("0.5.9"), "args": {**TREE, "attention-backend": "flashinfer"}},
        {"args": {**TREE, "attention-backend": "triton"}},
    ),
    (
        "tree-verified-with-a-causal-mask",
        "wrong answers",
        {"packages": sglang("0.5.23"), "args": {**TREE, "attention-backend": "flashinfer"}},
        {"args": {**TREE, "speculative-eagle-topk": 1, "attention-backend": "flashinfer"}},
    ),
    (
        "tree-verified-with-a-causal-mask",
        "wrong answers",
        {"packages": sglang("0.5.23"), "args": {**TREE, "attention-backend": "flashinfer"}},
        {"model": "llama-3.1-70b"},
    ),
    (
        "topk-turns-overlap-off",
        "slow",
        {"packages": sglang("0.5.10.post1"), "args": TREE},
        {"packages": sglang("0.5.11")},
    ),
    (
        "spec-v2-refuses-topk",
        "error",
        {"packages": sglang("0.5.9"), "args": TREE, "variables": {"SGLANG_ENABLE_SPEC_V2": "True"}},
        {"args": {**TREE, "speculative-eagle-topk": 1}},
    ),
    (
        "spec-v2-is-off-by-default",
        "slow",
        {"packages": sglang("0.5.9"), "args": EAGLE3},
        {"variables": {"SGLANG_ENABLE_SPEC_V2": "1"}},
    ),
    (
        "spec-v2-is-off-by-default",
        "slow",
        {"packages": sglang("0.5.10"), "args": EAGLE3},
        {"packages": sglang("0.5.11")},
    ),
    (
        "spec-v2-variable-is-gone",
        "no-op",
        {"packages": sglang("0.5.14"), "variables": {"SGLANG_ENABLE_SPEC_V2": "1"}},
        {"packages": sglang("0.5.11")},
    ),
    (
        "adaptive-needs-topk-1",
        "no-op",
        {"packages": sglang("0.5.23"), "args": {**TREE, "speculative-adaptive": True}},
        {"args": {**EAGLE3, "speculative-eagle-topk": 1, "speculative-adaptive": True}},
    ),
    (
        "adaptive-needs-eagle",
        "no-op",
        {"packages": sglang("0.5.23"), "args": {"speculative-algorithm": "NGRAM", "speculative-adaptive": True}},
        {"args": {"speculative-algorithm": "EAGLE", "speculative-adaptive": True}},
    ),
    (
        "accept-length-bounded-by-steps",
        "warning",
        {"args": {**EAGLE3, "speculative-num-steps": 2}},
        {"args": {**EAGLE3, "speculative-num-steps": 3}},
    ),
    (
        "wide-verify-reads-more-experts",
        "slow",
        {"args": TREE},  # 16 verified, 3 can be accepted
        {"args": {**EAGLE3, "speculative-num-steps": 3, "speculative-num-draft-tokens": 4}},
    ),
    (
        "draft-tokens-forced-by-topk-1",
        "no-op",
        {"args": {"speculative-eagle-topk": 1, "speculative-num-steps": 3, "speculative-num-draft-tokens": 8}},
        {"args": {"speculative-eagle-topk": 1, "speculative-num-steps": 3, "speculative-num-draft-tokens": 4}},
    ),
    (
        "more-draft-tokens-than-the-tree-has",
        "error",
        {"args": {**TREE, "speculative-num-draft-tokens": 22}},
        {"args": {**TREE, "speculative-num-draft-tokens": 21}},  # 4 + (2 - 1) * 4 ** 2 + 1 = 21
    ),
    (
        "eagle-lowers-max-running-requests",
        "warning",
        {"args": EAGLE3},
        {"args": {**EAGLE3, "max-running-requests": 256}},
    ),
    ("eagle-lowers-max-running-requests", "warning", {"args": {"speculative-algorithm": "NGRAM"}}, {"args": {}}),
    (
        "kimi-has-no-eagle3-delegation",
        "error",
        {"packages": sglang("0.5.9"), "args": EAGLE3},
        {"patches": ("kimi-k25-eagle3-delegation",)},
    ),
    (
        "kimi-has-no-eagle3-delegation",
        "error",
        {"packages": sglang("0.5.9"), "args": EAGLE3},
        {"packages": sglang("0.5.10rc0")},
    ),
    (
        "kimi-aux-layers-shifted",
        "slow",
        {"packages": sglang("0.5.12.post1"), "args": EAGLE3},
        {"packages": sglang("0.5.13.post1")},
    ),
    (
        "kimi-aux-states-before-the-reduce",
        "slow",
        {"packages": sglang("0.5.13.post1"), "architectures": ("sm_100a",), "args": {**EAGLE3, **FUSION, "tp": 8}},
        {"packages": sglang("0.5.14")},
    ),
    (
        "kimi-aux-states-before-the-reduce",
        "slow",
        {"packages": sglang("0.5.9"), "architectures": ("sm_90a",), "args": {**EAGLE3, **FUSION, "tp": 8}},
        {"architectures": ("sm_120a",)},
    ),
    # serving
    (
        "cuda-graph-max-bs-renamed",
        "error",
        {"packages": sglang("0.5.20"), "args": {"cuda-graph-max-bs": 128}},
        {"packages": sglang("0.5.18")},
    ),
    (
        "cuda-graph-max-bs-renamed",
        "error",
        {"packages": sglang("0.5.23"), "args": {"cuda-graph-max-bs": 128}},
        {"args": {"cuda-graph-max-bs-decode": 128}},
    ),
    (
        "cpu-cache-takes-all-memory",
        "warning",
        {"args": {"device": "cpu"}},
        {"args": {"device": "cpu", "max-total-tokens": 32768}},
    ),
    (
        "trtllm-attention-needs-sm100",
        "error",
        {"args": {"attention-backend": "trtllm_mla"}},
        {"architectures": ("sm_100a",)},
    ),
    (
        "trtllm-mha-is-partial-on-sm120",
        "warning",
        {"args": {"attention-backend": "trtllm_mha"}},
        {"architectures": ("sm_100a",)},
    ),
    ("fa3-needs-sm90", "error", {"args": {"attention-backend": "fa3"}}, {"architectures": ("sm_90a",)}),
    ("mla-default-is-triton-on-sm120", "warning", {}, {"args": {"attention-backend": "flashinfer"}}),
    ("fp8-cache-on-int4-kimi", "slow", {"args": {"kv-cache-dtype": "fp8_e4m3"}}, {"args": {"kv-cache-dtype": "bf16"}}),
    ("fp8-cache-on-int4-kimi", "slow", {"args": {"kv-cache-dtype": "fp8_e5m2"}}, {"model": "kimi-k2.5-nvfp4"}),
    (
        "fp8-cache-on-glm-5",
        "wrong answers",
        {"model": "glm-5-fp8", "packages": sglang("0.5.12.post1"), "args": {"kv-cache-dtype": "fp8_e4m3"}},
        {"packages": sglang("0.5.17")},
    ),
    (
        "glm-5-sparse-attention-needs-deepgemm",
        "error",
        {"model": "glm-5-nvfp4", "packages": sglang("0.5.12.post1"), "args": {"attention-backend": "nsa"}},
        {"args": {"attention-backend": "flashinfer"}},
    ),
    (
        "shared-experts-fusion-on-glm-nvfp4",
        "error",
        {"model": "glm-5.2-nvfp4"},
        {"args": {"disable-shared-experts-fusion": True}},
    ),
    (
        "moe-runner-needs-sm100",
        "error",
        {"args": {"moe-runner-backend": "flashinfer_trtllm"}},
        {"args": {"moe-runner-backend": "flashinfer_cutlass"}},
    ),
    (
        "nvfp4-moe-runner-not-chosen",
        "warning",
        {"model": "kimi-k2.5-nvfp4", "packages": sglang("0.5.21")},
        {"packages": sglang("0.5.22")},
    ),
    (
        "deepgemm-scales-nvfp4-wrong",
        "wrong answers",
        {"model": "kimi-k2.5-nvfp4", "packages": sglang("0.5.12.post1")},
        {"variables": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}},
    ),
    ("kimi-is-not-in-this-release", "error", {"packages": sglang("0.5.8.post1")}, {"packages": sglang("0.5.9")}),
    (
        "int4-experts-are-compiled-at-run-time",
        "error",
        {"packages": sglang("0.5.10"), "nvcc": "absent"},
        {"packages": sglang("0.5.9")},
    ),
    (
        "vllm-disable-by-batch-size-gone",
        "error",
        {
            "engine": "vllm",
            "packages": {"vllm": "0.33.0"},
            "args": {"speculative-config": '{"method": "eagle3", "disable_by_batch_size": 32}'},
        },
        {"args": {"speculative-config": '{"method": "eagle3"}'}},
    ),
]

# SGLang release; FlashInfer and kernel minimum of its start-up check, as read in the wheel, after the one before each.
MINIMA = [
    ("0.5.6.post2", ("0.5.2", "0.5.3"), "sgl-kernel", ("0.3.18", "0.3.19")),
    ("0.5.8", ("0.5.3", "0.6.1"), "sgl-kernel", ("0.3.20", "0.3.21")),
    ("0.5.9", ("0.6.1", "0.6.3"), "sgl-kernel", ("0.3.20", "0.3.21")),
    ("0.5.10", ("0.6.7", "0.6.7.post3"), "sglang-kernel", ("0.4.0", "0.4.1")),
    ("0.5.12.post1", ("0.6.8.post1", "0.6.11.post1"), "sglang-kernel", ("0.4.2.post1", "0.4.2.post2")),
    ("0.5.15.post1", ("0.6.11.post1", "0.6.12"), "sglang-kernel", ("0.4.3", "0.4.4")),
    ("0.5.20", ("0.6.17", "0.6.18"), "sglang-kernel", ("0.4.6.post1", "0.4.7")),
    ("0.5.23", ("0.7.1", "0.7.2"), "sglang-kernel", ("0.4.8", "0.4.9")),
]

# SGLang release, torch it pins (its metadata), kernel package and FlashInfer it pins.
PINS = [
    ("0.5.6.post2", "2.9.1", "sgl-kernel", "0.3.19", "0.5.3"),
    ("0.5.7", "2.9.1", "sgl-kernel", "0.3.20", "0.5.3"),
    ("0.5.8.post1", "2.9.1", "sgl-kernel", "0.3.21", "0.6.1"),
    ("0.5.9", "2.9.1", "sgl-kernel", "0.3.21", "0.6.3"),
    ("0.5.10rc0", "2.9.1", "sglang-kernel", "0.4.0", "0.6.6"),
    ("0.5.10.post1", "2.9.1", "sglang-kernel", "0.4.1", "0.6.7.post3"),
    ("0.5.11", "2.11.0", "sglang-kernel", "0.4.2", "0.6.8.post1"),
    ("0.5.12.post1", "2.11.0", "sglang-kernel", "0.4.2.post2", "0.6.11.post1"),
    ("0.5.13.post1", "2.11.0", "sglang-kernel", "0.4.3", "0.6.12"),
    ("0.5.14", "2.11.0", "sglang-kernel", "0.4.4", "0.6.12"),
    ("0.5.15.post1", "2.11.0", "sglang-kernel", "0.4.4", "0.6.12"),
    ("0.5.17", "2.11.0", "sglang-kernel", "0.4.5", "0.6.15.post1"),
    ("0.5.18", "2.13.0", "sglang-kernel", "0.4.6.post1", "0.6.17"),
    ("0.5.20", "2.13.0", "sglang-kernel", "0.4.7", "0.6.18"),
    ("0.5.21", "2.13.0", "sglang-kernel", "0.4.7", "0.6.18"),
    ("0.5.22", "2.14.1", "sglang-kernel", "0.4.9", "0.7.1"),
    ("0.5.23", "2.14.1", "sglang-kernel", "0.4.10", "0.7.2"),
]
COVERED_BY_TABLES = {"sglang-kernel-minimum", "sglang-flashinfer-minimum", "sglang-torch-pin"}


def verdicts(context: Context) -> dict[str, str]:
    return {item.rule.id: item.verdict for item in rules.fire(tuple(RULES.values()), context)}


@pytest.mark.parametrize(
    ("name", "severity", "bites", "change"),
    CASES,
    ids=[f"{index}-{case[0]}" for index, case in enumerate(CASES)],
)
def test_a_fact_bites_on_its_stack_and_not_on_the_next(
    name: str, severity: str, bites: dict[str, Any], change: dict[str, Any]
) -> None:
    context = replace(BOX, **bites)

    assert RULES[name].severity == severity
    assert verdicts(context).get(name) == "fires"
    assert verdicts(replace(context, **change)).get(name) is None


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} | COVERED_BY_TABLES == set(RULES)


@pytest.mark.parametrize(("release", "flashinfer", "kernel", "versions"), MINIMA)
def test_the_start_up_check_of_each_release_is_known(
    release: str, flashinfer: tuple[str, str], kernel: str, versions: tuple[str, str]
) -> None:
    too_old, enough = (
        verdicts(replace(BOX, packages={"sglang": release, kernel: versions[at], "flashinfer-python": flashinfer[at]}))
        for at in (0, 1)
    )

    assert too_old["sglang-kernel-minimum"] == too_old["sglang-flashinfer-minimum"] == "fires"
    assert "sglang-kernel-minimum" not in enough
    assert "sglang-flashinfer-minimum" not in enough


@pytest.mark.parametrize(("release", "torch", "kernel", "kernel_version", "flashinfer"), PINS)
def test_what_a_release_pins_is_clean_but_for_what_its_cuda_lane_says(
    release: str, torch: str, kernel: str, kernel_version: str, flashinfer: str
) -> None:
    cuda = "12.8" if torch == "2.9.1" else "13.0.2"
    pinned = {"sglang": release, "torch": torch, kernel: kernel_version, "flashinfer-python": flashinfer}
    context = Context(packages=pinned, patches=(), cuda=cuda, nvcc=cuda[:4], driver="580.95.05", variables={})
    environment = rules.about(tuple(RULES.values()), frozenset({"packages", "cuda", "nvcc", "driver", "variables"}))
    found = {item.rule.id: item.verdict for item in rules.fire(environment, context)}
    found.pop("kernel-needs-libnuma", None)

    assert found == {}
    other = rules.fire(environment, replace(context, packages={**pinned, "torch": "2.10.0"}))
    assert "sglang-torch-pin" in {item.rule.id for item in other}


def test_no_rule_lost_its_thread_numbers_to_a_yaml_comment() -> None:
    rows = [row for path in FOLDER.glob("*.yaml") for row in path.read_text().splitlines() if not row.startswith("#")]
    written = sorted(number for row in rows for number in re.findall(r"#\d+", row))
    read = [text for rule in RULES.values() for text in (rule.message, rule.source, rule.remedy)]

    assert sorted(number for text in read for number in re.findall(r"#\d+", text)) == written


def test_with_nothing_known_nothing_is_fine() -> None:
    found = rules.fire(tuple(RULES.values()), Context())

    assert {item.verdict for item in found} == {"cannot tell"}
    assert len(found) == len(RULES)
    assert all(item.missing for item in found)


def test_the_published_flags_are_judged_on_the_stack_they_were_published_for() -> None:
    """The flags of the published baseline and its EAGLE-3 arm, on sglang 0.5.9 with its two patches."""
    baseline = {
        "tp": 8,
        "trust-remote-code": True,
        "cuda-graph-max-bs": 128,
        "disable-custom-all-reduce": True,
        "attention-backend": "flashinfer",
        **FUSION,
    }
    stack = replace(
        BOX,
        packages=sglang(
            "0.5.9", sgl_kernel="0.3.21+cu130", torch="2.9.1+cu130", flashinfer_python="0.6.3", triton="3.5.1"
        ),
        patches=("sm120-symm-mem-tables", "kimi-k25-eagle3-delegation"),
        args=baseline,
    )
    alone = verdicts(stack)
    eagle = verdicts(replace(stack, args={**baseline, **TREE}))

    assert set(alone) == {"allreduce-fusion-silent-on-sm120", "custom-allreduce-flag-on-pcie", "kernel-needs-libnuma"}
    assert set(eagle) - set(alone) == {
        "tree-verified-with-a-causal-mask",
        "topk-turns-overlap-off",
        "accept-length-bounded-by-steps",
        "wide-verify-reads-more-experts",
        "eagle-lowers-max-running-requests",
        "kimi-aux-layers-shifted",
    }
