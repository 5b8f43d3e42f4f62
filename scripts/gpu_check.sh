#!/bin/bash
# gpu_check.sh [OUT]: what one machine with one NVIDIA GPU can prove of this project, offline, in ten minutes at most.
#
#   driver and GPU facts -> torch's own view of the GPU -> a small random model through SGLang or vLLM, where one of them
#   is installed, under load by `harness bench`, where that is; without an engine, torch alone.
#
# PYTHON names the interpreter whose packages are checked (default: python3), HARNESS the command (default: harness).
# Every check runs under a time limit of its own, and all of them together under BUDGET_S (default: 590): a hang is a
# result. OUT (default: a new temporary folder) gets one log a check and summary.json: for each check its verdict (ok,
# failed, timeout, not run), seconds and the reason. LOGBOOK, where set, names a logbook that gets an entry, with what
# could not be run. Exit code 1 when a check failed or hung.
set -u
python=${PYTHON:-python3}
harness=${HARNESS:-harness}
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$(mktemp -d)}
mkdir -p "$out"
rows=$out/checks.tsv
: >"$rows"
failed=0
budget=${BUDGET_S:-590}
SECONDS=0

note() { # check, verdict, seconds, reason
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$(printf '%s' "$4" | tr '\t\n' '  ')" | tee -a "$rows"
}

check() { # name, limit in seconds, command...
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ $limit -gt $((budget - SECONDS)) ] && limit=$((budget - SECONDS))
    if [ $limit -lt 1 ]; then
        note "$name" "not run" 0 "the $budget s of all checks were over"
        return 1
    fi
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    case $code in
    0) note "$name" ok $((SECONDS - began)) "$(tail -n 1 "$out/$name.log")" ;;
    124 | 137) note "$name" timeout $((SECONDS - began)) "no end within $limit s"; failed=1 ;;
    *) note "$name" failed $((SECONDS - began)) "exit $code: $(tail -n 1 "$out/$name.log")"; failed=1 ;;
    esac
    return $code
}

without() { # reason, checks...: those that cannot be run, and the end
    local reason=$1 name
    shift
    for name in "$@"; do note "$name" "not run" 0 "$reason"; done
    finish
}

finish() { # writes summary.json and the logbook's entry, and ends with the verdict
    python3 "$root/scripts/gpu_check_summary.py" "$rows" "$out/summary.json" ${LOGBOOK:+"$LOGBOOK"}
    exit $failed
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    without "no NVIDIA GPU on this machine" driver torch events server load
fi
check driver 30 nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap,power.limit --format=csv,noheader

if ! has torch; then
    without "$python has no torch" torch events server load
fi
check torch 120 "$python" - <<'PY' || without "torch did not pass" events server load
import torch

device = torch.cuda.get_device_properties(0)
arch = f"sm_{device.major}{device.minor}"
assert arch in torch.cuda.get_arch_list() or any(a.startswith("compute") for a in torch.cuda.get_arch_list()), arch
a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
b = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
error = ((a @ b).float().cpu() - a.float().cpu() @ b.float().cpu()).abs().max().item()
assert error < 2.0, f"matrix product is off by {error}"
print(f"torch {torch.__version__}, {device.name}, {arch}, product of 512x512 within {error:.2f}")
PY
check events 60 "$python" - <<'PY'
import torch

x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(3):
    x @ x
start.record()
for _ in range(20):
    x @ x
end.record()
torch.cuda.synchronize()
seconds = start.elapsed_time(end) / 1000 / 20
print(f"{2 * 4096**3 / seconds / 1e12:.0f} TFLOP/s in bf16 over 20 products of 4096x4096")
PY

engine=
for name in sglang vllm; do has "$name" && engine=$name && break; done
if [ -z "$engine" ] || ! has transformers; then
    without "$python has neither sglang nor vllm (with transformers)" server load
fi
check model 120 "$python" "$root/tests/real/tiny_llama.py" "$out/tiny-llama" || without "no model to serve" server load

serve() { # starts the engine, waits until it is healthy, asks for 64 tokens, puts load on it, stops it
    local port pid code=1 deadline=$((SECONDS + 330))
    port=${PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    if [ "$engine" = sglang ]; then
        setsid "$python" -m sglang.launch_server --model-path "$out/tiny-llama" --served-model-name tiny --host 127.0.0.1 \
            --port "$port" --context-length 2048 --mem-fraction-static 0.3 --enable-metrics &
    else
        setsid "$python" -m vllm.entrypoints.cli.main serve "$out/tiny-llama" --served-model-name tiny --host 127.0.0.1 \
            --port "$port" --max-model-len 2048 --gpu-memory-utilization 0.3 &
    fi
    pid=$!
    trap 'kill -KILL -- -$pid 2>/dev/null; exit 124' TERM # out of time: the server is in a session of its own
    while [ $SECONDS -lt $deadline ] && kill -0 $pid 2>/dev/null; do
        if curl -sf -m 5 "http://127.0.0.1:$port/health" >/dev/null; then code=0 && break; fi
        sleep 1
    done
    if [ $code = 0 ]; then
        curl -sf -m 60 "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' -d \
            '{"model":"tiny","prompt":"A server that answers","max_tokens":64,"temperature":0,"ignore_eos":true}' \
            >"$out/answer.json" && grep -q '"completion_tokens": *64' "$out/answer.json" || code=1
        curl -sf -m 10 "http://127.0.0.1:$port/metrics" >"$out/metrics.txt"
    fi
    if [ $code = 0 ] && command -v "$harness" >/dev/null; then
        (cd "$out" && timeout 90 "$harness" bench "http://127.0.0.1:$port" -c 1,8 -n 32 --max-tokens 64 --json) >"$out/load.json" \
            2>"$out/load.log"
        echo $? >"$out/load.code"
    fi
    kill -INT -- -$pid 2>/dev/null
    for _ in $(seq 30); do kill -0 -- -$pid 2>/dev/null || break; sleep 1; done
    kill -KILL -- -$pid 2>/dev/null
    [ $code = 0 ] && echo "$engine answered with 64 tokens"
    return $code
}
export -f serve
export engine out python harness
check server 450 bash -c serve
case $(cat "$out/load.code" 2>/dev/null) in
0) note load ok 0 "harness bench at C=1 and C=8, see load.json" ;;
6) note load ok 0 "harness bench at C=1 and C=8, some level suspect, see load.json" ;;
"") note load "not run" 0 "no server, or no \`$harness\` here" ;;
*) note load failed 0 "harness bench ended with $(cat "$out/load.code"), see load.log"; failed=1 ;;
esac
finish
