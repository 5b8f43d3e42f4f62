"""The kernels that sglang 0.5.23 calls on a CPU for cache handling and n-gram speculation, in plain torch.

Signatures and meaning are those of the call sites (sglang/kernels/ops/speculative, sglang/kernels/ops/kvcache,
sglang/srt/mem_cache/allocation.py). Written for small batches: loops over requests, no attempt at speed.
"""

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources):
    """Copy cache rows, in every layer's buffer: row `sources[i]` to `targets[i]`. Buffers come as addresses and row bytes."""
    to, come_from = targets.tolist(), sources.tolist()
    for address, row in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # All rows are read before any is written: a target may be the source of another.
        rows = [ctypes.string_at(address + index * row, row) for index in come_from]
        for index, data in zip(to, rows, strict=True):
            ctypes.memmove(address + index * row, data, row)


def assign_req_to_token_pool_cpu(requests, req_to_token, start, end, out_cache_loc, pool_len):
    """Write new cache places, laid end to end in `out_cache_loc`, into each request's row from `start` to `end`."""
    taken = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        places = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = places.to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(requests, req_to_token, start, end, out_cache_loc, pool_len):
    """The opposite: read each request's places from `start` to `end` into `out_cache_loc`, end to end."""
    taken = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[taken : taken + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, lengths, out_cache_loc, pool_len, topk, columns):
    """Each request's `topk * columns` places after its length, one block a request."""
    block = topk * columns
    places = out_cache_loc.view(-1)
    for index, (row, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        places[index * block : (index + 1) * block] = req_to_token[row, length : length + block].to(places.dtype)


def fill_bonus_tokens_cpu(accepted, counts, bonus, stride):
    """The last accepted token of each request."""
    tokens = accepted.view(-1)
    for index, count in enumerate(counts.tolist()):
        bonus[index] = tokens[index * stride + count - 1]


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accepted_out):
    """The cache places of accepted tokens, in order; -1 marks none."""
    index = accept_index.view(-1)
    index = index[index >= 0].long()
    accepted_out[: index.numel()] = out_cache_loc[index].to(accepted_out.dtype)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Walk each request's tree of guesses along what the target model predicts.

    From the root: among the children of the last accepted node, take the one that guessed the target's prediction; stop
    when none did. Every accepted node's prediction is written, the last one's being the token gained without a guess.
    """
    requests, depth = accept_index.shape
    predicted = target_predict.view(-1).tolist()
    guesses, nodes, children, siblings = (
        part.view(requests, -1).tolist() for part in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for request in range(requests):
        last, at, count = nodes[request][0], 0, 0
        accept_index[request, 0] = last
        while count < depth - 1:
            at = children[request][at]
            while at != -1 and guesses[request][at] != predicted[last]:
                at = siblings[request][at]
            if at == -1:
                break
            predicts[last] = predicted[last]
            count += 1
            last = nodes[request][at]
            accept_index[request, count] = last
        predicts[last] = predicted[last]
        accept_token_num[request] = count


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, batch, size
):
    """A tree's links from its mask: `mask[i, j]` says that node j is node i or one of its ancestors.

    A node's parent is its last ancestor, its depth the number of them; first child and next sibling are the next later
    node with that parent, -1 where there is none. Roots have no siblings.
    """
    order = torch.arange(size)
    mask = tree_mask.view(batch, size, size).bool() & (order < order[:, None])
    depths = mask.sum(-1)
    parents = torch.where(mask.any(-1), torch.where(mask, order, -1).max(-1).values, -1).tolist()
    positions.view(batch, size).copy_(depths + verified_seq_len.view(batch, 1))
    retrieve_index.view(batch, size).copy_(torch.arange(batch * size).view(batch, size))
    for request, parent in enumerate(parents):
        later = [[k for k in range(node + 1, size)] for node in range(size)]
        child = [next((k for k in later[node] if parent[k] == node), -1) for node in range(size)]
        sibling = [
            next((k for k in later[node] if parent[k] == parent[node]), -1) if parent[node] >= 0 else -1
            for node in range(size)
        ]
        retrieve_next_token.view(batch, size)[request] = torch.tensor(child)
        retrieve_next_sibling.view(batch, size)[request] = torch.tensor(sibling)
