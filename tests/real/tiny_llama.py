"""Make a tiny random Llama in the Hugging Face layout: `python tiny_llama.py FOLDER [--seed N] [--noise SCALE]`.

Runs inside an engine's environment, because that has torch, transformers and tokenizers; imports nothing of ours.
About 3 million bfloat16 parameters and a byte-level BPE tokenizer with a chat template. What it says is noise, but
greedy decoding is deterministic and soon repeats itself, so n-gram speculation is accepted now and then. `--noise`
adds Gaussian noise (a share of each matrix's own deviation) to the same seed's weights: a draft model whose
acceptance is a dial.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|turn|>"]
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# The merges come from this text alone, so that the tokenizer is the same on every machine.
CORPUS = """
A server that answers many people at once keeps a queue, a batch and a cache. The queue holds the requests that have
arrived and wait for a place; the batch holds those that are being worked on; the cache holds what was computed for the
tokens that have been read so far. When a request ends, its place goes to the next one in the queue. The time until the
first token is the time in the queue and the time to read the prompt; after that every step of the batch gives one token
to each request. A small model may guess several tokens ahead, and the large model checks the guesses in a single step:
when the guesses are right the answer comes sooner, and when they are wrong nothing but time is lost.
def schedule(queue, batch, limit):
    while queue and len(batch) < limit:
        request = queue.pop(0)
        batch.append(request)
    return [request for request in batch if not request.done]
for step in range(100):
    for request in schedule(queue, batch, limit=8):
        token = model.next(request.tokens)
        request.tokens.append(token)
        request.done = token == end or len(request.tokens) >= request.limit
Write a function that takes a list of numbers and returns the sum, the mean, the smallest and the largest of them.
Explain how a hash table works, and what happens when two keys fall into the same bucket. 0123456789
"""


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([CORPUS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    return fast


def model(words: PreTrainedTokenizerFast, seed: int, noise: float) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
            bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
        )
    )  # fmt: skip
    if noise:
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for weights in llama.parameters():
                if weights.dim() > 1:
                    weights.add_(noise * weights.std() * torch.randn_like(weights))
    keep_quiet(llama, words)
    return llama.to(torch.bfloat16)


def keep_quiet(llama: LlamaForCausalLM, words: PreTrainedTokenizerFast) -> None:
    """Greedy decoding never says a special token or half a character: a server would send neither as text.

    The output row of such a token becomes half the row of one that may be said, which is therefore always ahead of it.
    """
    ids = range(len(words))
    said = [i for i in ids if i not in words.all_special_ids and words.decode([i]).isascii() and words.decode([i])]
    silent = sorted(set(ids) - set(said) | {words.convert_tokens_to_ids(word) for word in SPECIAL})
    said = [i for i in said if i not in silent]
    with torch.no_grad():
        for position, token in enumerate(silent):
            llama.lm_head.weight[token] = llama.lm_head.weight[said[position % len(said)]] / 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--noise", type=float, default=0.0)
    chosen = arguments.parse_args()
    words = tokenizer()
    words.save_pretrained(chosen.folder)
    model(words, chosen.seed, chosen.noise).save_pretrained(chosen.folder)


if __name__ == "__main__":
    main()
