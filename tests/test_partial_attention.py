"""How results over parts of the keys merge, and travel between ranks, against attention over all keys.

What computes the parts doesn't matter here: see test_attention.py and test_sparse_attention.py.
"""

import functools
import math

import pytest
import torch
from torch import Tensor

from megatron_longstraw.partial_attention import gather, merge, merge_owners, probabilities, scatter_heads
from tests.ranks import Layout, Ranks

HEADS, TOKENS, KEYS, VALUE = 2, 6, 3, 4
"""Heads and keys are those of one rank."""
NONE, FIRST_ONLY, NOT_FIRST = 0, 1, 2
"""Tokens that see no keys, those of rank 0, those of the others."""

_close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-14)


def _parts(owners: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """(out [W * H, T, V], lse [W * H, T]) of all heads over each rank's keys, and over all keys."""
    generator = torch.Generator().manual_seed(owners)
    scores = torch.randn(owners * HEADS, TOKENS, owners * KEYS, generator=generator, dtype=torch.float64)
    values = torch.randn(owners * KEYS, VALUE, generator=generator, dtype=torch.float64)
    scores[:, NONE] = scores[:, FIRST_ONLY, KEYS:] = scores[:, NOT_FIRST, :KEYS] = -math.inf

    def attend(keys: slice) -> tuple[Tensor, Tensor]:
        lse = scores[..., keys].logsumexp(-1)
        return probabilities(scores[..., keys], lse[..., None]) @ values[keys], lse

    return [attend(slice(KEYS * r, KEYS * (r + 1))) for r in range(owners)], attend(slice(None))


def test_merge_equals_whole() -> None:
    (a, b), (out, lse) = _parts(2)
    got_out, got_lse = merge(*a, *b)
    some = slice(NONE + 1, None)  # one of the two may be empty, not both
    _close(got_out[:, some], out[:, some])
    _close(got_lse, lse)


def _exchange() -> None:
    """On each rank of an owner group."""
    group = torch.distributed.group.WORLD
    rank, size = group.rank(), group.size()
    parts, whole = _parts(size)
    mine = slice(rank * HEADS, (rank + 1) * HEADS)
    out, lse = merge_owners(*parts[rank], group)
    _close(out, whole[0][mine])
    _close(lse, whole[1][mine])
    assert not out[:, NONE].any() and (lse[:, NONE] == -math.inf).all()
    for x in whole:
        assert torch.equal(gather(x[mine], group), x)
    _close(scatter_heads(parts[rank][0], group), sum(out for out, _ in parts)[mine])


@pytest.mark.parametrize("size", [2, 4])
def test_owners_exchange(ranks: Ranks, size: int) -> None:
    ranks.run(Layout(tp=size), _exchange)
