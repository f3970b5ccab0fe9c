"""The exactness tests on one CUDA device: the CUDA attention kernels, NCCL, Transformer Engine where it imports."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_longstraw.config import RunConfig
from tests.exactness import edge_groups, tiny_run, two_steps, with_objective, with_schedule
from tests.ranks import Layout, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def cuda_ranks() -> Iterator[Ranks]:
    pools = Ranks("cuda")
    yield pools
    pools.close()


def _has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


def _run(dtype: str, backend: str = "local", **model: Any) -> RunConfig:
    run = tiny_run(Layout(), dtype=dtype)
    # 64 is a head dimension that flash attention takes
    transformer = {**run.model.transformer, "kv_channels": 64}
    return replace(run, model=replace(run.model, backend=backend, transformer=transformer, **model))


def _check(cuda_ranks: Ranks, run: RunConfig) -> None:
    (result,) = cuda_ranks.run(Layout(), two_steps, run, edge_groups())
    for step in result["steps"]:
        assert step["comparison"]["passed"], step["comparison"]


@pytest.mark.parametrize("backend", ["local", "transformer_engine"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_equal_stock(cuda_ranks: Ranks, dtype: str, backend: str) -> None:
    if backend == "transformer_engine" and not _has_transformer_engine():
        pytest.skip("Transformer Engine is not installed")
    _check(cuda_ranks, _run(dtype, backend))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [3, 100, 4096])
def test_chunk_sizes(cuda_ranks: Ranks, dtype: str, chunk: int) -> None:
    _check(cuda_ranks, with_schedule(_run(dtype), prompt_chunk_tokens=chunk, log_prob_block_tokens=chunk))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variants(cuda_ranks: Ranks, dtype: str) -> None:
    _check(cuda_ranks, _run(dtype, tie_embeddings=True))
    _check(cuda_ranks, with_objective(_run(dtype), entropy_coef=0.1, loss_agg_mode="seq-mean-token-mean"))
    _check(cuda_ranks, with_schedule(_run(dtype), recompute=False))


def test_float64_kernels(cuda_ranks: Ranks) -> None:
    _check(cuda_ranks, tiny_run(Layout(), dtype="float64"))
