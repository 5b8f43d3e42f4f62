"""A tiny random-weights Llama as GGUF, 6.8 MB, made in a second: `python tests/tiny_model.py OUT.gguf [--noise X]`.

Four layers, hidden size 256, 512 tokens, weights from seed 0: the same file on every machine, so greedy outputs are
the same text. What it says is noise; llama.cpp takes it for a model like any other. `noise` adds that share of Gaussian
noise (seed 1000) to the same weights: a draft model whose acceptance is a dial (1.0 at 0, about 0.6 at 0.05, 0.2 at
0.15, measured on llama.cpp b11434).
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, CONTEXT = 4, 256, 4, 2, 4096
FEED_FORWARD = 3 * HIDDEN
KV_WIDTH = KV_HEADS * HIDDEN // HEADS
SPREAD = 0.05
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def merges() -> list[str]:
    """250 pairs of letters to merge: consonant and vowel, vowel and consonant, space and letter, doubles."""
    vowels, consonants, space = "aeiou", "bcdfghjklmnpqrstvwxyz", chr(256 + 32)
    pairs = [first + second for first in consonants for second in vowels]
    pairs += [first + second for first in vowels for second in consonants]
    pairs += [space + letter for letter in "abcdefghijklmnopqrstuvwxyz"]
    pairs += [letter * 2 for letter in "bcdefglmnoprst"]
    return pairs


def write(path: Path, *, noise: float = 0.0) -> Path:
    """Write the model.

    Args:
        path: the file.
        noise: standard deviation of what is added to each weight, as a share of the weights' own.
    """
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer)
    _vocabulary(writer)
    _weights(writer, noise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter) -> None:
    writer.add_name("tiny-random-llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*SPECIAL, *alphabet(), *merges()]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in merges()])
    writer.add_bos_token_id(SPECIAL.index("<s>"))
    writer.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    writer.add_unk_token_id(SPECIAL.index("<unk>"))
    writer.add_pad_token_id(SPECIAL.index("<pad>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _weights(writer: gguf.GGUFWriter, noise: float) -> None:
    seeded, noisy = np.random.default_rng(0), np.random.default_rng(1000)

    def random(name: str, rows: int, columns: int, spread: float = SPREAD) -> None:
        values = seeded.standard_normal((rows, columns), dtype=np.float32) * spread
        if noise:
            values += noise * spread * noisy.standard_normal((rows, columns), dtype=np.float32)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    vocabulary = len(SPECIAL) + 256 + len(merges())
    random("token_embd", vocabulary, HIDDEN, 1.0)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm")
        ones(f"{block}.ffn_norm")
        random(f"{block}.attn_q", HIDDEN, HIDDEN)
        random(f"{block}.attn_k", KV_WIDTH, HIDDEN)
        random(f"{block}.attn_v", KV_WIDTH, HIDDEN)
        random(f"{block}.attn_output", HIDDEN, HIDDEN)
        random(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN)
        random(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
        random(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
    ones("output_norm")
    random("output", vocabulary, HIDDEN)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("out", type=Path)
    command.add_argument("--noise", type=float, default=0.0)
    arguments = command.parse_args()
    write(arguments.out, noise=arguments.noise)


if __name__ == "__main__":
    main()
