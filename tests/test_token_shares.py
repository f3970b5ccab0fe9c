"""Tokens that ranks share: every W-th is a rank's, and what has heads changes sides and back."""

import pytest
import torch

from megatron_longstraw.token_shares import (
    gather_shares,
    heads_to_tokens,
    place,
    share_of,
    slice_of_share,
    tokens_to_heads,
)
from tests.ranks import Layout, Ranks

TOKENS, HEADS = 12, 2
"""Heads are those of one rank."""


def _shares() -> None:
    group = torch.distributed.group.WORLD
    rank, size = place(group)
    whole = torch.randn(TOKENS, size * HEADS, 3, generator=torch.Generator().manual_seed(0))
    of_tokens, of_heads = whole[rank::size], whole[:, rank * HEADS : (rank + 1) * HEADS]
    assert torch.equal(share_of(whole, group), of_tokens)
    assert torch.equal(gather_shares(of_tokens, group), whole)
    assert torch.equal(heads_to_tokens(of_heads, group), of_tokens)
    assert torch.equal(tokens_to_heads(of_tokens, group), of_heads)
    for start in range(TOKENS):
        for stop in range(start, TOKENS + 1):
            mine = [t for t in range(rank, TOKENS, size) if start <= t < stop]
            assert list(range(rank, TOKENS, size)[slice_of_share(slice(start, stop), group)]) == mine
    with pytest.raises(ValueError, match=f"{TOKENS - 1} tokens can't be shared evenly by {size} ranks"):
        share_of(whole[1:], group)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_tokens(ranks: Ranks, size: int) -> None:
    ranks.run(Layout(tp=size), _shares)


def test_a_rank_by_itself_has_them_all() -> None:
    whole = torch.randn(TOKENS, HEADS)
    for change in (share_of, gather_shares, heads_to_tokens, tokens_to_heads):
        assert torch.equal(change(whole, None), whole)
    assert slice_of_share(slice(3, 7), None) == slice(3, 7)
