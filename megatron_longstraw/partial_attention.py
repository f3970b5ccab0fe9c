"""Attention over parts of the keys: how the parts merge, and travel between ranks that own one each.

Attention over a set of keys gives ``out`` and its log-sum-exp ``lse``; results over disjoint sets merge exactly. Where
a query has no key in a set, out is 0 and lse -inf.

The W ranks of an owner group each have H heads of queries, and their own part of the keys. They gather the queries of
all heads, attend with them to their own keys, and send each rank the results of that rank's heads. Head h of rank r is
head r * H + h of the group. Tensors count heads in their first dimension.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def statistics_dtype(x: Tensor) -> torch.dtype:
    """In which lse and merged results are held: float32, or float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 where lse is -inf: of no keys none is likely."""
    return (scores - lse.masked_fill(lse == -math.inf, 0)).exp()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (out [..., D], lse [...]) over the union of two disjoint sets of keys, of which one may be empty."""
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def merge_owners(out: Tensor, lse: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Attention of this rank's heads over the keys of all owners, in one message.

    Args:
        out: [W * H, ..., D], of all heads over this rank's own keys, in the dtype of lse.
        lse: [W * H, ...].
        group: the owner group.

    Returns:
        [H, ..., D] and [H, ...]; 0 and -inf for a query that has no key on any rank.
    """
    sent = torch.cat([out, lse[..., None]], -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    outs, lses = received.unflatten(0, (group.size(), -1)).split([out.shape[-1], 1], -1)
    lses = lses[..., 0]
    total = lses.logsumexp(0)
    return outs.mul_(probabilities(lses, total)[..., None]).sum(0), total


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...] of each rank, heads or what else, -> [W * N, ...], one rank's behind the other's."""
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def scatter_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[W * H, ...] partial sums on each rank -> [H, ...] whole sums of this rank's heads."""
    scattered = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(scattered, x.contiguous(), group=group)
    return scattered
