"""GLM-5.2: gradients and expert biases of ours are the stock schedule's, on every layout, and every layout's are one
rank's. What this does not exercise: NCCL, Transformer Engine's grouped experts."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_longstraw.config import ConfigError, ParallelConfig, RunConfig, load_config
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import (
    check_equal,
    check_ours,
    check_same,
    check_steps,
    join,
    rank_device,
    two_steps,
    with_schedule,
)
from tests.glm52 import LAST_LAYER_CHOOSES, TINY_GLM, glm_groups, tiny_glm
from tests.ranks import Layout, Ranks

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, ep=2),  # experts across data-parallel ranks: micro-batches in step
    Layout(tp=2, pp=2, ep=2),
    *(pytest.param(x, marks=pytest.mark.slow) for x in (Layout(tp=4, ep=4), Layout(tp=2, dp=2, ep=4))),
]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(Layout(), two_steps, tiny_glm(Layout()), glm_groups())


def test_one_rank_equals_stock(one_rank: list[dict[str, Any]]) -> None:
    check_steps(one_rank)
    gradients = join([r["steps"][0]["ours"] for r in one_rank])
    without = {name for name, gradient in gradients.items() if not gradient.any()}
    assert without == {name for name in gradients if ".indexer." in name}  # as in stock without the KL loss


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_steps_equal_stock_and_one_rank(ranks: Ranks, one_rank: list[dict[str, Any]], layout: Layout) -> None:
    results = ranks.run(layout, two_steps, tiny_glm(layout), glm_groups())
    check_steps(results)
    weights = join([r["weights"] for r in results])
    for name, tensor in join([r["weights"] for r in one_rank]).items():
        assert torch.equal(weights[name], tensor), name
    for step, side in itertools.product((0, 1), ("stock", "ours")):
        want = join([r["steps"][step]["stock"] for r in one_rank])
        check_same(join([r["steps"][step][side] for r in results]), want)
    for step, result in itertools.product((0, 1), results):
        for name, bias in result["steps"][step]["buffers"].items():
            assert bias.abs().max() > 0, name
            assert torch.equal(bias, one_rank[0]["steps"][step]["buffers"][name]), name


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_megatrons_own_attention_agrees(ranks: Ranks, layout: Layout) -> None:
    """The stock side with Megatron's DSAttention, which shares only the indexer with ours."""
    check_steps(ranks.run(layout, two_steps, tiny_glm(layout), glm_groups(), "megatron"))


def test_other_dispatcher(ranks: Ranks, one_rank: list[dict[str, Any]]) -> None:
    """alltoall is the one that all other tests have."""
    layout = Layout(tp=2, ep=2)
    results = ranks.run(layout, two_steps, tiny_glm(layout, moe_token_dispatcher_type="allgather"), glm_groups())
    check_steps(results)
    want = join([r["steps"][1]["stock"] for r in one_rank])
    check_same(join([r["steps"][1]["ours"] for r in results]), want)


@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_last_layer_may_compute_an_index(ranks: Ranks, rate: float) -> None:
    """Of seven layers the last one does, and is the only one with experts; its router counts prompt tokens too, unless
    biases stay as they are: then it chooses for responses only."""
    run = tiny_glm(Layout(), **LAST_LAYER_CHOOSES, moe_router_bias_update_rate=rate)
    check_steps(ranks.run(Layout(), two_steps, run, glm_groups()))


@pytest.mark.parametrize(
    "sizes", [(7, 1, 5, 9), (66, 4, 1000, 1000), (4096, 256, 65536, 128)], ids=["small", "chunk", "whole"]
)
def test_chunk_page_and_block_sizes_change_nothing(
    ranks: Ranks, one_rank: list[dict[str, Any]], sizes: tuple[int, int, int, int]
) -> None:
    chunk, page, block, query_block = sizes
    run = with_schedule(
        tiny_glm(Layout()),
        prompt_chunk_tokens=chunk,
        page_tokens=page,
        attention_block_tokens=block,
        query_block_tokens=query_block,
    )
    results = ranks.run(Layout(), two_steps, run, glm_groups())
    check_steps(results)
    want = join([r["steps"][1]["stock"] for r in one_rank])
    check_same(join([r["steps"][1]["ours"] for r in results]), want)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, ep=2), Layout(dp=2, ep=2), pytest.param(Layout(pp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_packing_responses_changes_nothing(ranks: Ranks, one_rank: list[dict[str, Any]], layout: Layout) -> None:
    """Packs of 5 + 1 + 10 and 6 + 4 tokens, over blocks of 7 queries; biases follow as many tokens."""
    run = with_schedule(tiny_glm(layout), pack_tokens=16, query_block_tokens=7)
    results = ranks.run(layout, two_steps, run, glm_groups())
    check_steps(results)
    check_ours(results, one_rank)


def test_idle_work_of_the_stock_side_is_recomputed_with_the_rest(ranks: Ranks) -> None:
    """Data-parallel ranks share experts and have one group: else one rank would wait in collectives for ever."""
    layout = Layout(dp=2, ep=2)
    run = with_schedule(tiny_glm(layout), recompute=False)
    check_steps(ranks.run(layout, two_steps, run, glm_groups()[:1]))


def test_keeping_attention_changes_no_bit(ranks: Ranks) -> None:
    layout = Layout(tp=2, ep=2)
    runs = [with_schedule(tiny_glm(layout), keep_attention=keep) for keep in (True, False)]
    check_equal(*(ranks.run(layout, two_steps, run, glm_groups()[:1]) for run in runs))


def _counts(run: RunConfig, groups: list[RolloutGroup], recompute: bool, forward_only: bool) -> dict[str, Tensor]:
    """Token counts of one pass by ours: the routers' buffers, before the step's end clears them."""
    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups, unwrapped

    model = build_ddp_model(with_schedule(run, recompute=recompute))
    model[0].config.finalize_model_grads_func = None
    mine = prompt_groups(groups, run, rank_device())
    forward_backward(
        forward_step_func=grpo_forward_step(run),
        data_iterator=iter(mine),
        model=model,
        num_microbatches=len(mine),
        forward_only=forward_only,
        options=run.schedule,
    )
    buffers = unwrapped(model)[0].named_buffers()
    return {name: tensor.clone() for name, tensor in buffers if name.endswith("local_tokens_per_expert")}


@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_counts_are_of_logical_tokens(ranks: Ranks, gradient: str, recompute: bool) -> None:
    """Every router counts each token of each non-empty response's whole sequence once, topk experts a token."""
    run = with_schedule(tiny_glm(Layout()), prompt_gradient=gradient)
    groups = glm_groups()
    tokens = sum(
        len(group.prompt_ids) + len(response.ids) - 1
        for group in groups
        for response in group.responses
        if len(response.ids)
    )
    (counts,) = ranks.run(Layout(), _counts, run, groups, recompute, False)
    assert len(counts) == 3
    for name, count in counts.items():
        assert count.sum() == tokens * run.model.transformer["moe_router_topk"], name


def test_evaluation_counts_nothing(ranks: Ranks) -> None:
    (counts,) = ranks.run(Layout(), _counts, tiny_glm(Layout()), glm_groups(), True, True)
    assert not any(count.any() for count in counts.values())


def test_padding_is_not_counted(ranks: Ranks) -> None:
    """Odd lengths on two ranks with sequence parallelism: the ranks' counts add up to one rank's."""
    (alone,) = ranks.run(Layout(), _counts, tiny_glm(Layout()), glm_groups(), True, False)
    pair = ranks.run(Layout(tp=2, ep=2), _counts, tiny_glm(Layout(tp=2, ep=2)), glm_groups(), True, False)
    for name, count in alone.items():
        assert torch.equal(pair[0][name] + pair[1][name], count), name


REFUSED = {
    "KL loss": ({"dsa_indexer_loss_coeff": 0.01}, {}, r"dsa_indexer_loss_coeff=0.01 is not supported .*KL loss"),
    "aux loss": ({"moe_aux_loss_coeff": 0.01}, {}, "moe_aux_loss_coeff=0.01 is not supported"),
    "token dropping": ({"moe_expert_capacity_factor": 1.0}, {}, "moe_expert_capacity_factor=1.0 is not supported"),
    "jitter": ({"moe_input_jitter_eps": 0.1}, {}, "moe_input_jitter_eps=0.1 is not supported"),
    "YaRN": ({"rope_type": "yarn"}, {}, "rope_type='yarn' is not supported"),
    "kernels": ({"dsa_kernel_backend": "tilelang"}, {}, "dsa_kernel_backend='tilelang' is not supported"),
    "split": (
        {"num_layers": 8, "moe_layer_freq": 1},
        {"pp": 2},
        r"starts a stage on layer 5, .*set parallel.pipeline_layers: \[2, 6\]",
    ),
    "pattern": ({"moe_layer_freq": [0, 1]}, {}, "moe_layer_freq has 2 entries: needs one for each of 5 layers"),
    "given split": (
        {"num_layers": 78, "moe_layer_freq": 1},
        {"pp": 4, "pipeline_layers": (19, 20, 20, 19)},
        r"starts a stage on layer 20, .*set parallel.pipeline_layers: \[18, 20, 20, 20\]",
    ),
    "no split": ({}, {"pp": 5}, "layer 4, .*use fewer stages"),
    "wrong sum": ({}, {"pp": 2, "pipeline_layers": (2, 4)}, r"are 6 layers: needs model.transformer.num_layers=5"),
    "experts": ({}, {"ep": 3}, "num_moe_experts=8 must be a multiple of parallel.ep=3"),
    "allgather over DP": ({"moe_token_dispatcher_type": "allgather"}, {"ep": 2}, "lengths differ; use alltoall"),
    "sequence parallelism": ({}, {"tp": 2, "sequence_parallel": False}, "sequence_parallel=false is not supported"),
    "first stage": ({"num_layers_in_first_pipeline_stage": 2}, {}, "set parallel.pipeline_layers instead"),
}


@pytest.mark.parametrize("transformer, parallel, message", REFUSED.values(), ids=REFUSED)
def test_refused(transformer: dict[str, Any], parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(
            model=replace(TINY_GLM, transformer={**TINY_GLM.transformer, **transformer}),
            parallel=ParallelConfig(**parallel),
        )


@pytest.mark.parametrize("stages", range(2, 9))
def test_a_named_split_works(stages: int) -> None:
    """The split that a refusal names is one that is not refused."""
    transformer = {**TINY_GLM.transformer, "num_layers": 78, "moe_layer_freq": 1}
    with pytest.raises(ConfigError) as error:
        RunConfig(
            model=replace(TINY_GLM, transformer=transformer),
            parallel=ParallelConfig(pp=stages, pipeline_layers=(78 - stages + 1, *[1] * (stages - 1))),
        )
    split = tuple(int(n) for n in re.findall(r"\d+", str(error.value).rpartition("pipeline_layers: ")[2]))
    assert sum(split) == 78 and len(split) == stages
    RunConfig(
        model=replace(TINY_GLM, transformer=transformer),
        parallel=ParallelConfig(pp=stages, pipeline_layers=split),
    )


def test_examples_are_valid() -> None:
    folder = Path(__file__).resolve().parents[1] / "examples" / "glm52"
    full = load_config(folder / "glm52_32gpu.yaml")
    layers = full.model.transformer["moe_layer_freq"]
    assert layers == [0] * 3 + [1] * 75
    parallel = full.parallel
    assert (parallel.tp, parallel.pp, parallel.ep, parallel.pipeline_layers) == (8, 4, 8, (18, 20, 20, 20))
    assert load_config(folder / "tiny.yaml").parallel.ep == 2


def _block_sizes(built: RunConfig, run: RunConfig, groups: list[RolloutGroup]) -> set[tuple[str, int, int]]:
    """(phase, query_block, key_block) of all choices of a pass under `run`, of a model built with `built`."""
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.models import mla
    from megatron_longstraw.trainer import build_ddp_model, unwrapped

    model = build_ddp_model(built)
    runtime, choose, seen = unwrapped(model)[0].runtime, mla.choose_positions, set()

    def note(*args: Any, query_block: int, key_block: int, **options: Any) -> Any:
        seen.add((runtime.segment.phase.value, query_block, key_block))
        return choose(*args, query_block=query_block, key_block=key_block, **options)

    with patch.object(mla, "choose_positions", note):
        for schedule in ("longstraw", "stock"):
            run_schedule(schedule, model, groups, run, rank_device())
    return seen


def test_blocks_are_those_of_the_schedule_that_runs(ranks: Ranks) -> None:
    """As a loop of one's own gives it; a stock sequence has those that the model was built with."""
    built = tiny_glm(Layout())
    run = with_schedule(built, query_block_tokens=3, attention_block_tokens=7)
    assert ranks.run(Layout(), _block_sizes, built, run, glm_groups()[1:]) == [
        {("capture", 3, 7), ("response", 3, 7), ("plain", 40, 13)}
    ]
