"""Hold the stand-in kernels against sglang's own code: run by the environment's python, imports nothing of ours.

Trees of guesses are drawn at random; links are compared with those that sglang derives on the host
(`ngram_worker._derive_tree_links`), depths and verification with the definition, written out by recursion.
"""

import random
import sys

import numpy as np
import torch
from sgl_kernel import reconstruct_indices_from_tree_mask, verify_tree_greedy_cpu
from sglang.srt.speculative.ngram_worker import _derive_tree_links

ROUNDS, SIZE, BATCH, WORDS = 200, 8, 3, 4


def ancestors(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [node, *ancestors(parents, parents[node])]


def accepted(parents: list[int], guesses: list[int], predicted: list[int], node: int) -> list[int]:
    """The path of nodes whose guesses were predicted, from a node that was accepted."""
    for child in range(SIZE):
        if parents[child] == node and guesses[child] == predicted[node]:
            return [node, *accepted(parents, guesses, predicted, child)]
    return [node]


def check(rng: random.Random) -> None:
    parents = [[-1, *(rng.randrange(node) for node in range(1, SIZE))] for _ in range(BATCH)]
    mask = np.array([[[j in ancestors(tree, i) for j in range(SIZE)] for i in range(SIZE)] for tree in parents])
    lengths = torch.tensor([rng.randrange(1, 50) for _ in range(BATCH)])
    positions, index, child, sibling = (torch.zeros(BATCH, SIZE, dtype=torch.int64) for _ in range(4))

    reconstruct_indices_from_tree_mask(
        torch.from_numpy(mask).flatten(), lengths, positions.view(-1), index, child, sibling, BATCH, SIZE
    )

    children, siblings = _derive_tree_links(mask.flatten(), BATCH, SIZE)
    assert child.tolist() == children.tolist()
    assert sibling.tolist() == siblings.tolist()
    depths = [[len(ancestors(tree, node)) - 1 for node in range(SIZE)] for tree in parents]
    assert (positions - lengths.view(-1, 1)).tolist() == depths
    assert index.view(-1).tolist() == list(range(BATCH * SIZE))

    guesses = torch.tensor([[rng.randrange(WORDS) for _ in range(SIZE)] for _ in range(BATCH)])
    predicted = torch.tensor([[rng.randrange(WORDS) for _ in range(SIZE)] for _ in range(BATCH)])
    predicts = torch.full((BATCH * SIZE,), -1)
    accept, count = torch.full((BATCH, SIZE), -1), torch.zeros(BATCH, dtype=torch.int64)
    verify_tree_greedy_cpu(predicts, accept, count, guesses, index, child, sibling, predicted)
    for request, tree in enumerate(parents):
        path = accepted(tree, guesses[request].tolist(), predicted[request].tolist(), 0)
        nodes = [request * SIZE + node for node in path]
        assert accept[request, : len(path)].tolist() == nodes
        assert int(count[request]) == len(path) - 1
        assert predicts[nodes].tolist() == predicted.view(-1)[nodes].tolist()


for seed in range(ROUNDS):
    check(random.Random(seed))
sys.stdout.write(f"{ROUNDS} batches of {BATCH} trees agree\n")
