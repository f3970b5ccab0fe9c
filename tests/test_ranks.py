"""The test harness itself: results by rank, one rank's failure told and not hung on, ranks that live on."""

import os

import pytest

from tests.ranks import Layout, RankError, Ranks


def _who() -> tuple[int, int, int, int]:
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_data_parallel_world_size(),
        os.getpid(),
    )


def _one_fails() -> None:
    import torch

    rank = torch.distributed.get_rank()
    if rank == 1:
        raise ValueError("the reason")


def test_layouts_share_processes(ranks: Ranks) -> None:
    by_tp = ranks.run(Layout(tp=2), _who)
    by_pp = ranks.run(Layout(pp=2), _who)
    by_dp = ranks.run(Layout(dp=2), _who)
    assert [r[:3] for r in by_tp] == [(0, 0, 1), (1, 0, 1)]
    assert [r[:3] for r in by_pp] == [(0, 0, 1), (0, 1, 1)]
    assert [r[:3] for r in by_dp] == [(0, 0, 2), (0, 0, 2)]
    assert [r[3] for r in by_tp] == [r[3] for r in by_pp] == [r[3] for r in by_dp]


def test_failure_of_one_rank_is_told(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="the reason"):
        ranks.run(Layout(tp=2), _one_fails)
    assert len(ranks.run(Layout(tp=2), _who)) == 2
