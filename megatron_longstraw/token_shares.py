"""How the ranks of an owner group share the tokens of a segment: rank r of W takes tokens r, r + W, r + 2 W, ...

So the shares are even in number, and also in how many positions come before their tokens. What has heads, of which
each rank has its own, changes sides in one message: from the rank's heads of all tokens to all heads of its tokens.

Shapes: T tokens, of which W must be a divisor; H heads of this rank. A group of None is a rank by itself.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longstraw.partial_attention import gather


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, W): this rank's tokens are range(rank, T, W)."""
    return (0, 1) if group is None else (group.rank(), group.size())


def share_of(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T, ...] -> [T / W, ...], this rank's tokens."""
    rank, size = place(group)
    if len(x) % size:
        raise ValueError(f"{len(x)} tokens can't be shared evenly by {size} ranks: pad them")
    return x[rank::size]


def slice_of_share(tokens: slice, group: dist.ProcessGroup | None) -> slice:
    """Where those of some tokens that are this rank's lie in its share."""
    rank, size = place(group)
    first, last = (-((rank - token) // size) for token in (tokens.start, tokens.stop))  # rounded up
    return slice(first, last)


def gather_shares(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T / W, ...] of each rank's tokens -> [T, ...] on every rank."""
    if group is None:
        return x
    return gather(x, group).unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(0, 1)


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T, H, ...] of this rank's heads -> [T / W, W * H, ...] of its tokens."""
    if group is None:
        return x
    by_rank = x.unflatten(0, (-1, group.size())).transpose(0, 1)
    return _exchange(by_rank, group).transpose(0, 1).flatten(1, 2)


def tokens_to_heads(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T / W, W * H, ...] of this rank's tokens -> [T, H, ...] of its heads."""
    if group is None:
        return x
    by_rank = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return _exchange(by_rank, group).transpose(0, 1).flatten(0, 1)


def _exchange(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[W, ...], what is for each rank -> [W, ...], what is from each rank."""
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
