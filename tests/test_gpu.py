"""The exactness tests on one CUDA device: the CUDA attention kernels, NCCL, and, where they import,
flash-linear-attention's delta rule and Transformer Engine's layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_longstraw.compare import GATES
from megatron_longstraw.config import RunConfig
from tests.exactness import edge_groups, group, response, tiny_run, two_steps, with_objective, with_schedule
from tests.glm52 import glm_groups, tiny_glm
from tests.qwen36 import qwen_run, qwen_two_steps
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_responses(cuda_ranks: Ranks, dtype: str) -> None:
    """Flash attention's backward reads the log-sum-exp of one sequence of several heads."""
    _check(cuda_ranks, with_schedule(_run(dtype), pack_tokens=20))


def test_float64_kernels(cuda_ranks: Ranks) -> None:
    _check(cuda_ranks, tiny_run(Layout(), dtype="float64"))


@pytest.mark.parametrize("pack_tokens", [0, 20])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_glm52(cuda_ranks: Ranks, dtype: str, pack_tokens: int) -> None:
    # rounded to bfloat16, a few tokens' router scores are ties, which go either way: there every expert takes part
    experts = {"moe_router_topk": 8} if dtype == "bfloat16" else {}
    run = with_schedule(tiny_glm(Layout(), dtype, **experts), pack_tokens=pack_tokens)
    (result,) = cuda_ranks.run(Layout(), two_steps, run, glm_groups())
    for step in result["steps"]:
        assert step["comparison"]["passed"], step["comparison"]
        assert step["index_choices"]["largest_gap"] <= GATES[dtype].tie, step["index_choices"]


def _has_flash_linear_attention() -> bool:
    from megatron.core.ssm.gated_delta_net import common

    return common.HAVE_FLA


@pytest.mark.parametrize("pack_tokens", [0, 256])
@pytest.mark.parametrize(
    "dtype, kernels",
    [("float32", "torch"), ("float64", "torch"), ("bfloat16", "torch"), ("bfloat16", "flash-linear-attention")],
)
def test_qwen36(cuda_ranks: Ranks, dtype: str, kernels: str, pack_tokens: int) -> None:
    if kernels == "flash-linear-attention" and not _has_flash_linear_attention():
        pytest.skip("flash-linear-attention is not installed")
    heads = {"kv_channels": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    transformer = {**heads, "deterministic_mode": kernels == "torch"}
    run = qwen_run(Layout(), dtype, transformer=transformer, pack_tokens=pack_tokens)
    g = np.random.default_rng(0)
    groups = [
        group("a", 101, response(g, 5), response(g, 1), response(g, 70)),
        group("b", 2, response(g, 3)),
        group("c", 28, response(g, 9, [1, 0, 0, 0, 0, 0, 0, 0, 0]), response(g, 2)),
    ]
    (result,) = cuda_ranks.run(Layout(), qwen_two_steps, run, groups)
    for step in result["steps"]:
        assert step["comparison"]["passed"], step["comparison"]
