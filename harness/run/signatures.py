"""Log lines by which CUDA servers of every make say how they die: data, read by `diagnose`.

An earlier entry is nearer to the root of the trouble. A pattern matches one line. "facts 3c" are breakage strings
collected from the projects' issue trackers.
"""

from harness.engines.engine import Signature

GENERIC: tuple[Signature, ...] = (
    Signature(
        "kernel built for another torch",
        r"undefined symbol: _ZN?K?(3c10|2at|5torch)|undefined symbol: \S*(c10_cuda_check|MessageLogger)",
        "the kernel wheel was built for another torch than is installed (not a missing architecture): install the "
        "torch it pins, or build it against this one; `harness validate` finds the pair",
        source="sglang#29317, #5247, #5100",
    ),
    Signature(
        "undefined symbol",
        r"undefined symbol: \S+",
        "a library was built against another version of one it loads: `harness validate` says which",
        source="sglang#29317",
    ),
    Signature(
        "library of another CUDA",
        r"lib(nvrtc|cudart|cublas\w*|cudnn\w*|nvJitLink)\.so\.\d+: cannot open shared object file",
        "a wheel of another CUDA major is in this environment: lock the cu13 wheel for a cu13 torch",
        source="sglang#10951, #16052, Mooncake#1298",
    ),
    Signature(
        "shared library missing",
        r"\S+\.so(\.\d+)*: cannot open shared object file",
        "install the library, or lock the wheel that carries it",
    ),
    Signature(
        "torch without this architecture",
        r"CUDA capability sm_\d+ is not compatible with the current PyTorch|of compute capability \(CC\) [\d.]+",
        "this torch has no kernels for this GPU: take a build whose arch list has it (`torch.cuda.get_arch_list()`)",
        source="pytorch#150733, #151376",
    ),
    Signature(
        "no kernel image",
        r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
        "no code for this GPU's architecture and no PTX to make it from: install a build for it; check the arch list",
        source="sglang#7249, vllm#19906",
        decisive=True,
    ),
    Signature(
        "all-reduce fusion without this architecture",
        r"No supported CUDA architectures found for major versions \[9, 10\]",
        "FlashInfer's fused all-reduce has no SM120 kernels here: switch the fusion off, or take FlashInfer >= 0.6.17",
        source="sglang#15650",
    ),
    Signature(
        "nvcc too old for this GPU",
        r"No supported CUDA architectures found for major versions \[12\]|FlashInfer requires GPUs with sm75 or higher|"
        r"SM 12\.x requires CUDA >= 12\.9",
        "the toolkit that compiles kernels is older than 12.9: point CUDA_HOME at a newer one",
        source="flashinfer#3674, #3675, vllm#50705",
    ),
    Signature(
        "attention kernel without this architecture",
        r"TllmGenFmhaRunner.*Unsupported architecture|Unsupported architecture.*TllmGenFmhaRunner",
        "trtllm-gen attention exists for SM100 and SM103 only: `attention-backend: flashinfer` or `triton`",
        source="flashinfer#3263, #5445, sglang#24633",
        decisive=True,
    ),
    Signature(
        "DeepGEMM without this architecture",
        r"Assertion error \(.*attention\.hpp:\d+\): Unsupported architecture|has no attribute 'get_num_sms'",
        "DeepGEMM has no SM120 kernels here: choose a backend that does without it",
        source="sglang#26087",
    ),
    Signature(
        "unsupported architecture",
        r"[Uu]nsupported (GPU |CUDA )?arch(itecture)?\b|not supported on (this|the current) (GPU|device)",
        "a chosen backend has no kernels for this GPU: choose another backend",
        source="facts 3c",
    ),
    Signature(
        "ptxas too old",
        r"ptxas fatal\s*: Value 'sm_\w+' is not defined|ptxas.*(failed|fatal|error)",
        "the assembler does not know this GPU: Triton >= 3.6 and TRITON_PTXAS_BLACKWELL_PATH at the toolkit's ptxas",
        source="triton#8539, #9181, #10331",
        decisive=True,
    ),
    Signature(
        "symmetric memory table",
        r"KeyError: 12\b|Device capability 12 not supported",
        "the symmetric-memory size table has no entry for SM120: bind the patch sm120-symm-mem-tables",
        source="facts 2a",
    ),
    Signature(
        "no multicast",
        r"multicast operations are not supported",
        "there is no NVSwitch here: switch torch symmetric memory off",
        source="sglang#30364",
    ),
    Signature(
        "CUDA out of memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
        r"Not enough memory\. Please try to increase --mem-fraction-static|No available memory for the cache blocks",
        "lower the memory fraction, the context or the largest CUDA graph batch; `harness doctor` shows who else is on "
        "the GPU",
    ),
    Signature(
        "illegal memory access",
        r"illegal memory access was encountered|cudaErrorIllegalAddress|CUDA error: misaligned address",
        "a kernel wrote where it may not: run once with CUDA_LAUNCH_BLOCKING=1 to name it, and try another backend",
        retry=True,
        decisive=True,
    ),
    Signature(
        "not a probability",
        r"probability tensor contains either .?inf.?, .?nan.? or element < 0",
        "a quantised GEMM wrote garbage (FP4 race, UE8M0 scales): choose another GEMM backend",
        source="flashinfer#2708, sglang#20043",
    ),
    Signature(
        "shared memory full",
        r"failed to extend /dev/shm|Bus error|unable to (open|mmap|allocate) shared memory",
        "/dev/shm is too small: in a container --ipc=host or --shm-size",
    ),
    Signature(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|NCCL (operation|communicator).{0,40}(timed out|timeout)|"
        r"Some NCCL operations have failed or timed out|DistBackendError.*(timed out|timeout)",
        "the ranks stopped talking: NCCL_P2P_DISABLE=1 tells whether PCIe P2P (IOMMU, ACS) is to blame",
        source="nccl#1999, vllm#33041",
        retry=True,
        decisive=True,
    ),
    Signature(
        "NCCL error",
        r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclInvalidUsage|NCCL error|"
        r"NCCL WARN .*(fail|error)",
        "run once with NCCL_DEBUG=INFO; small /dev/shm and mismatched NCCL versions are the usual causes",
        retry=True,
    ),
    Signature(
        "watchdog",
        r"watchdog timeout \((?!.*soft=True)",
        "one forward pass took longer than the watchdog allows: a stuck collective or a kernel being compiled",
        retry=True,
        decisive=True,
    ),
    Signature(
        "driver too old",
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old|cudaErrorInsufficientDriver",
        "CUDA 13 needs driver 580 or newer",
        decisive=True,
    ),
    Signature(
        "no GPU",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|Found no NVIDIA driver on your system",
        "the server sees no GPU: check CUDA_VISIBLE_DEVICES and the container's --gpus",
        decisive=True,
    ),
    Signature(
        "port in use",
        r"Address already in use|\[Errno 98\]|EADDRINUSE|couldn't bind",
        "another process took the port: leave the port out of the recipe to get one that is free",
        retry=True,
        decisive=True,
    ),
    Signature(
        "bad flag",
        r"error: unrecognized arguments|error: invalid argument|error: argument -|invalid choice: |unrecognized option|"
        r"error: the following arguments are required",
        "this version does not know the flag or its value: `harness plan` checks flags against the version",
        decisive=True,
    ),
    Signature(
        "tokenizer missing",
        r"Can't load tokenizer|Unable to load tokenizer|Couldn't instantiate the backend tokenizer|"
        r"tokenizer(_config)?\.(json|model).{0,40}(not found|No such file)",
        "the model folder lacks its tokenizer files: fetch the whole model",
    ),
    Signature(
        "model not found",
        r"HFValidationError|Repo id must (be|use)|is not a local folder and is not a valid model identifier|"
        r"does not appear to have a file named config\.json|LocalEntryNotFoundError|Can't load (the )?configuration|"
        r"No such file or directory: '[^']*(config\.json|safetensors|\.gguf)",
        "check the model's path: servers read a missing folder as a name on a hub",
    ),
    Signature(
        "weights incomplete",
        r"SafetensorError|InvalidHeaderDeserialization|MetadataIncompleteBuffer|"
        r"No such file or directory: .*\.safetensors|Cannot find any model weights",
        "a weight file is missing or torn: compare the folder with its index, fetch it again",
    ),
    Signature(
        "stale JIT lock",
        r"Waited on lock file|waiting for lock file",
        "a killed build left its lock: remove `lock` under torch_extensions",
    ),
    Signature(
        "package missing",
        r"ModuleNotFoundError: No module named|ImportError: cannot import name",
        "the environment lacks a package: put it into the spec and lock again",
    ),
    Signature(
        "too many open files",
        # vLLM warns of the possibility at every start under a hard limit, in the error's own words.
        r"^(?!.*can cause fd limit errors).*(?:Too many open files|\[Errno 24\]|EMFILE)",
        "raise the limit: `ulimit -n 65536` before the run",
        decisive=True,
    ),
    Signature(
        "disk full",
        r"No space left on device|\[Errno 28\]|ENOSPC",
        "free some space: caches, logs and /dev/shm all count",
        decisive=True,
    ),
    Signature(
        "child process failed",
        r"Received sigquit from a child process|SIGQUIT received|Scheduler hit an exception|"
        r"Engine core initialization failed|EngineCore (encountered|failed)|EngineDeadError",
        "the traceback above this line, of the child, says why",
        decisive=True,
    ),
    Signature(
        "kernels did not load",
        r"Could not load any common_ops library",
        "the lines below it say why: mostly a kernel wheel built for another torch",
        source="sglang#17460",
    ),
    # Last: whatever stands above it is nearer to the cause.
    Signature(
        "another rank went",
        r"ncclRemoteError|gloo/transport/.*by peer|recvValue failed|failed to recv, got 0 bytes",
        "one rank of the group ended and this one noticed: the log of the one that went first says why",
        source="torch's and gloo's words for a peer that is gone; gloo's seen on sglang 0.5.23",
        of_a_peer=True,
    ),
)

# What a server that does nothing was doing last; asked only when the deadline has passed.
HANGS: tuple[Signature, ...] = (
    Signature(
        "NCCL hang",
        r"NCCL INFO|[Ii]nit torch distributed|init_process_group|world size.*nccl|NCCL version",
        "the ranks wait for each other: PCIe P2P blocked by IOMMU or ACS is the usual cause; NCCL_P2P_DISABLE=1 tells",
        source="nccl#1999, vllm#33041",
        retry=True,
    ),
    Signature(
        "waiting for a lock",
        r"Waited on lock file|waiting for lock file",
        "a killed build left its lock: remove `lock` under torch_extensions",
    ),
    Signature(
        "hung in graph capture",
        r"[Cc]apture cuda graph begin|[Cc]apturing CUDA graph",
        "lower the largest CUDA graph batch, or start without graphs to see whether the model itself runs",
        source="sglang#29562",
    ),
    Signature(
        "still loading weights",
        r"[Ll]oad(ing)? (model|weights?|safetensors|checkpoint)|Load weight begin",
        "reading weights takes longer than the deadline: raise `timeouts.start_s`, or put the model on a faster disk",
        retry=True,
    ),
)
