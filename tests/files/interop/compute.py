"""What vLLM's and SGLang's own scripts compute of stored requests: makes the `computed-by-*` files beside it.

ENVIRONMENT/bin/python compute.py vllm REQUESTS.jsonl OUT.json     in the environment of a spec that has vLLM
ENVIRONMENT/bin/python compute.py sglang REQUESTS.jsonl OUT.json   in one that has SGLang
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace


def gaps(request):
    return [after[0] - before[0] for before, after in pairwise(request["chunks"])]


def token_gaps(request):
    return [
        gap / chunk[2] for gap, chunk in zip(gaps(request), request["chunks"][1:], strict=True) for _ in range(chunk[2])
    ]


def output(kind, request, waits):
    """A request as the script holds it."""
    made = kind()
    made.generated_text, made.success, made.itl = request["text"], True, waits
    made.ttft = request["chunks"][0][0] - request["sent_s"]
    made.latency = request["chunks"][-1][0] - request["sent_s"]
    made.prompt_len, made.start_time = request["prompt_tokens"], request["sent_s"]
    setattr(made, "output_tokens" if hasattr(made, "output_tokens") else "output_len", request["output_tokens"])
    return made


def by_vllm(requests, duration):
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = [output(RequestFuncOutput, request, gaps(request)) for request in requests]
    found, _ = calculate_metrics([], outputs, duration, None, [50, 90, 95, 99], {})
    plain = {name: value for name, value in vars(found).items() if not name.startswith("percentiles")}
    for name in ("ttft", "tpot", "itl", "e2el"):
        plain |= {f"p{int(share)}_{name}_ms": value for share, value in getattr(found, f"percentiles_{name}_ms")}
    return plain


def by_sglang(requests, duration):
    from sglang.benchmark.serving import RequestFuncOutput, calculate_metrics

    words = SimpleNamespace(encode=lambda text, add_special_tokens: text.split())
    rows = [
        SimpleNamespace(prompt_len=one["prompt_tokens"], text_prompt_len=one["prompt_tokens"], vision_prompt_len=0)
        for one in requests
    ]
    found = {}
    for backend, waits in (("sglang-oai-chat", gaps), ("sglang", token_gaps)):
        outputs = [output(RequestFuncOutput, request, waits(request)) for request in requests]
        found[backend] = dict(vars(calculate_metrics(rows, outputs, duration, words, backend)[0]))
    return found


if __name__ == "__main__":
    tool, source, target = sys.argv[1:]
    stored = [json.loads(line) for line in Path(source).read_text().splitlines()]
    measured = sorted((one for one in stored if one["phase"] == "measure"), key=lambda one: one["sent_s"])
    span = max(one["end_s"] for one in measured) - min(one["sent_s"] for one in measured)
    computed = {"vllm": by_vllm, "sglang": by_sglang}[tool](measured, span)
    Path(target).write_text(json.dumps(computed, indent=1, default=float) + "\n")
