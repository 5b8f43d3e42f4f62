"""Load generators of others: those that the project's built environments hold (`harness envs`), and how each is called.

A command is a template with {port}, {concurrency}, {requests} and {tokens}; it asks the same of the same server as our
own client does. Their clients want a tokenizer, which is made here, in their own environment, from nothing.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 100
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_TOKENIZER = """
import json, pathlib, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
letters = pre_tokenizers.ByteLevel.alphabet()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>"]
trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=letters)
tokenizer.train_from_iterator(["the of and to in is that for " * 20, pathlib.Path(json.__file__).read_text()], trainer)
names = dict(zip(("unk_token", "bos_token", "eos_token"), special))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="</s>", model_max_length=32768, **names)
fast.chat_template = "{% for m in messages %}{{ m['content'] }}\\n{% endfor %}"
fast.save_pretrained(sys.argv[1])
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(fast), **shape}
pathlib.Path(sys.argv[1], "config.json").write_text(json.dumps(config))
"""


@dataclass(frozen=True)
class Peer:
    """A load generator of others: its name, its interpreter, what that runs, and the options of a run."""

    name: str
    python: str
    program: tuple[str, ...]
    options: str = ""

    def help(self) -> tuple[str, ...]:
        """The command that prints its help."""
        return (self.python, *self.program, "--help")

    def command(self, folder: Path) -> str:
        """The template of a run; `folder` takes its tokenizer and its own results."""
        tokenizer = folder / f"tokenizer-{Path(self.python).parents[1].name}"
        if not tokenizer.exists():
            subprocess.run([self.python, "-c", _TOKENIZER, str(tokenizer)], env=environment(), check=True)
        options = self.options.replace("{tokenizer}", str(tokenizer)).replace("{folder}", str(folder))
        return f"{shlex.join((self.python, *self.program))} {options}"


def environment() -> dict[str, str]:
    """Variables under which peers neither ask a network nor report home."""
    return {**os.environ, **QUIET}


def built() -> Iterator[Peer]:
    """Peers in the built environments, each once."""
    home = Path(os.environ.get("HARNESS_HOME", PROJECT / ".harness"))
    for name, command, program, options in _KNOWN:
        folders = [folder for folder in sorted((home / "envs").glob("*")) if (folder / "bin" / command).exists()]
        if folders:
            yield Peer(name, str(folders[0] / "bin" / "python"), program, options)


_RANDOM = f"--random-input-len {PROMPT_TOKENS} --random-output-len {{tokens}} --model truth --tokenizer {{tokenizer}}"
_LOAD = "--num-prompts {requests} --max-concurrency {concurrency} --ready-check-timeout-sec 0 --seed 1 --disable-tqdm"
_SGLANG = (
    "--backend sglang-oai-chat --base-url http://127.0.0.1:{port} --dataset-name random-ids --random-range-ratio 1"
    f" {_RANDOM} {_LOAD} --warmup-requests 0 --output-file {{folder}}/sglang.jsonl"
)
# The extension module that SGLang's wheel holds, without the package around it, which imports torch first.
_RUST = """
import glob, importlib.util, sys, sysconfig
(found,) = glob.glob(sysconfig.get_paths()["purelib"] + "/sglang/srt/rust_extensions/_bench*.so")
spec = importlib.util.spec_from_file_location("_bench", found)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.run_argv(["sglang-bench", *sys.argv[1:]])
"""
_KNOWN = (
    (
        "vLLM bench serve",
        "vllm",
        ("-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        "--backend openai-chat --endpoint /v1/chat/completions --base-url http://127.0.0.1:{port} --dataset-name random"
        f" {_RANDOM} {_LOAD} --num-warmups 0 --ignore-eos",
    ),
    (
        "SGLang bench_serving",
        "sglang",
        ("-m", "sglang.bench_serving"),
        _SGLANG,
    ),
    ("SGLang's Rust client, alone", "sglang", ("-c", _RUST), _SGLANG),
)
