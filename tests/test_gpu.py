"""The exactness tests on one CUDA device: the CUDA attention kernels, NCCL, Transformer Engine where it imports."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.exactness import edge_groups, tiny_run, two_steps
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


@pytest.mark.parametrize("backend", ["local", "transformer_engine"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_equal_stock(cuda_ranks: Ranks, dtype: str, backend: str) -> None:
    if backend == "transformer_engine" and not _has_transformer_engine():
        pytest.skip("Transformer Engine is not installed")
    run = tiny_run(Layout(), dtype=dtype)
    # 64 is a head dimension that flash attention takes
    transformer = {**run.model.transformer, "kv_channels": 64}
    run = replace(run, model=replace(run.model, backend=backend, transformer=transformer))
    (result,) = cuda_ranks.run(Layout(), two_steps, run, edge_groups())
    for step in result["steps"]:
        assert step["comparison"]["passed"], step["comparison"]


def test_float64_kernels(cuda_ranks: Ranks) -> None:
    (result,) = cuda_ranks.run(Layout(), two_steps, tiny_run(Layout(), dtype="float64"), edge_groups())
    for step in result["steps"]:
        assert step["comparison"]["passed"], step["comparison"]
