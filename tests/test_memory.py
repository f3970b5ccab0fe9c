"""Peak bytes, counted: they don't grow with the number of responses, and no more than a chunk's with the prompt's."""

import contextlib
import functools
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_longstraw.config import RunConfig, ScheduleConfig
from megatron_longstraw.measure import PeakBytes
from megatron_longstraw.prompt_state import OwnedRows, PromptState
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import group, rank_device, response, tiny_run, with_schedule
from tests.glm52 import LAST_LAYER_CHOOSES, glm_groups, tiny_glm
from tests.qwen36 import qwen_run
from tests.ranks import Layout, Ranks


def _peak(schedule: str, prompt: int, responses: int, pack_tokens: int = 0) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    layout = Layout(tp=ps.get_tensor_model_parallel_world_size(), pp=ps.get_pipeline_model_parallel_world_size())
    options = ScheduleConfig(
        prompt_chunk_tokens=256, attention_block_tokens=256, log_prob_block_tokens=64, pack_tokens=pack_tokens
    )
    run = tiny_run(layout, schedule=options)
    generator = np.random.default_rng(0)
    rollouts = [group("g", prompt, *(response(generator, 40) for _ in range(responses)))]
    result = run_schedule(schedule, build_ddp_model(run), rollouts, run, torch.device("cpu"))
    return {"peak": result.peak_bytes}


@pytest.mark.parametrize(
    ("layout", "pack_tokens"), [(Layout(), 0), (Layout(tp=2), 0), (Layout(pp=2), 0), (Layout(), 80)], ids=str
)
def test_peak_does_not_depend_on_the_number_of_responses(ranks: Ranks, layout: Layout, pack_tokens: int) -> None:
    """Six more responses cost their ids and, on the last stage, their log-probs and three scalars; nothing else."""
    ids, outputs = 6 * 40 * 8, 6 * (40 * 4 + 3 * 4)

    def least(layout: Layout, responses: int) -> list[int]:
        # gloo's thread may hold a finished collective's input a moment longer (see PeakBytes): that only ever adds
        repeats = range(3 if layout.tp > 1 else 1)
        tries = [ranks.run(layout, _peak, "longstraw", 2000, responses, pack_tokens) for _ in repeats]
        return [min(peaks) for peaks in zip(*([r["peak"] for r in result] for result in tries), strict=True)]

    few, many = least(layout, 2), least(layout, 8)
    grown = [b - a for a, b in zip(few, many, strict=True)]
    assert grown == [ids] * (layout.pp - 1) * layout.tp + [ids + outputs] * layout.tp
    assert max(grown) < 0.002 * min(few)


def _peak_of_responses(
    model: str, layout: Layout, prompt: int, tokens: Sequence[int], always: bool, schedule: ScheduleConfig
) -> int:
    from megatron_longstraw import schedule as module
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    run = replace((qwen_run if model == "qwen36" else tiny_run)(layout), schedule=schedule)
    draw = np.random.default_rng(0)
    rollouts = [group("g", prompt, *(response(draw, n) for n in tokens))]
    with patch.object(module, "_recompute_above", return_value=0) if always else contextlib.nullcontext():
        return run_schedule("longstraw", build_ddp_model(run), rollouts, run, torch.device("cpu")).peak_bytes


@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize(
    ("model", "layout", "prompt", "tokens", "changes"),
    [
        ("dense", Layout(), 2049, [32] * 2, {}),
        ("dense", Layout(), 257, [4096] * 2, {"prompt_chunk_tokens": 65536}),
        ("dense", Layout(), 257, [32] * 2, {"prompt_chunk_tokens": 65536}),
        ("dense", Layout(), 257, [1024, 128, 128], {}),
        ("dense", Layout(pp=2), 65, [1024, *[128] * 3], {"prompt_chunk_tokens": 64}),  # in flight beside the long one
        ("qwen36", Layout(), 257, [256, *[4] * 8], {"pack_tokens": 256}),  # the delta rule pads each
    ],
    ids=str,
)
def test_short_micro_batches_need_no_recomputation(
    ranks: Ranks, gradient: str, model: str, layout: Layout, prompt: int, tokens: list[int], changes: dict[str, int]
) -> None:
    """Up to 1/8 of the longest micro-batch with a graph, four layers keep less than its one layer; in detached mode no
    prompt chunk is one, and in a pipeline every one is recomputed."""
    settings = {"prompt_chunk_tokens": 256, "attention_block_tokens": 256, **changes}
    schedule = ScheduleConfig(prompt_gradient=gradient, **settings)  # type: ignore[arg-type]
    ours, always = (
        ranks.run(layout, _peak_of_responses, model, layout, prompt, tokens, each, schedule) for each in (False, True)
    )
    assert all(a <= b for a, b in zip(ours, always, strict=True)), (ours, always)


def test_packs_of_short_responses_take_no_more_than_a_long_one(ranks: Ranks) -> None:
    """The delta rule pads each of the sixteen to 64 tokens."""
    schedule = ScheduleConfig(prompt_chunk_tokens=256, pack_tokens=256, prompt_gradient="detached")
    alone, packed = (
        ranks.run(Layout(), _peak_of_responses, "qwen36", Layout(), 257, tokens, True, schedule)[0]
        for tokens in ([256], [256, *[1] * 16])
    )
    assert packed <= 1.01 * alone


def test_prompt_costs_its_state_and_no_more(ranks: Ranks) -> None:
    """From 1000 to 4000 tokens: rows and their float32 gradients, and the ids; stock adds full activations. The rows
    of the last of four layers are gone where the peak is in prompt backward, and not where it is in replay."""
    peaks = {
        (schedule, prompt): ranks.run(Layout(), _peak, schedule, prompt, 2)[0]["peak"]
        for schedule in ("longstraw", "stock")
        for prompt in (1025, 4097)
    }
    row = 4 * 2 * 2 * 8 * (4 + 4)  # layers x (key, value) x heads x dim x (row and gradient)
    ids = 8
    ours = peaks["longstraw", 4097] - peaks["longstraw", 1025]
    assert ours <= 3072 * (row + ids), (ours / 3072, row)
    assert ours >= 3072 * row * 7 / 8
    assert peaks["stock", 4097] - peaks["stock", 1025] > 2 * ours


def test_counter_counts_live_storages_once() -> None:
    weight = torch.zeros(1000)
    with PeakBytes([weight, weight[10:]]) as memory:
        a = weight + 1  # 4000 more
        b = a[5:].view(-1, 5)  # a view: nothing
        del a
        c = b.double()  # 7960
        del b, c
        d = torch.empty(100)  # 400
        del d
    assert memory.peak == 4000 + 4000 + 995 * 8


def _peak_of_layers(layers: int, keep_attention: bool) -> dict[str, int]:
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    schedule = ScheduleConfig(prompt_chunk_tokens=256, attention_block_tokens=256, keep_attention=keep_attention)
    run = tiny_run(Layout(), schedule=schedule)
    run = replace(run, model=replace(run.model, transformer={**run.model.transformer, "num_layers": layers}))
    rollouts = [group("g", 1025, response(np.random.default_rng(0), 40))]
    model = build_ddp_model(run)
    result = run_schedule("longstraw", model, rollouts, run, torch.device("cpu"))
    return {"peak": result.peak_bytes, "parameters": sum(p.numel() for chunk in model for p in chunk.parameters())}


@pytest.mark.parametrize("keep_attention", [False, True])
def test_a_layer_costs_its_weights_rows_and_one_input(ranks: Ranks, keep_attention: bool) -> None:
    """Nothing of a recomputed layer outlives its backward (Megatron's own layers keep their last graph)."""
    few, many = (ranks.run(Layout(), _peak_of_layers, n, keep_attention)[0] for n in (3, 7))
    weights = (many["parameters"] - few["parameters"]) * (4 + 4)
    rows = 4 * 1024 * 2 * 2 * 8 * (4 + 4)
    inputs = 4 * 256 * 32 * 4
    attention = 4 * 256 * (32 + 4) * 4 if keep_attention else 0  # outputs and log-sum-exps of 4 heads
    grown = many["peak"] - few["peak"]
    assert grown <= 1.02 * (weights + rows + inputs + attention), (grown, weights, rows, inputs, attention)


def _tensors_left(schedule: str, run: RunConfig, groups: list[RolloutGroup]) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a pass leaves behind with a graph, wherever they are, or on a token dispatcher."""
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    def kept() -> dict[int, torch.Tensor]:
        gc.collect()
        graphs = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        dispatchers = [m.token_dispatcher for c in model for m in c.modules() if hasattr(m, "token_dispatcher")]
        maps = [x for dispatcher in dispatchers for x in vars(dispatcher).values() if isinstance(x, torch.Tensor)]
        return {id(x): x for x in graphs + maps}

    model = build_ddp_model(run)
    before = kept()
    run_schedule(schedule, model, groups, run, torch.device("cpu"))
    return [tuple(x.shape) for key, x in kept().items() if key not in before]


@pytest.mark.parametrize("schedule", ["longstraw", "stock"])
@pytest.mark.parametrize("model", ["dense", "qwen36", "glm52 alltoall", "glm52 allgather"])
def test_nothing_of_a_layer_outlives_a_pass(ranks: Ranks, model: str, schedule: str) -> None:
    """Megatron's modules keep tensors of their last forward; recomputation may end a forward before its last line."""
    name, _, dispatcher = model.partition(" ")
    run = {
        "dense": tiny_run(Layout()),
        "qwen36": qwen_run(Layout()),
        "glm52": tiny_glm(Layout(), moe_token_dispatcher_type=dispatcher or "alltoall"),
    }[name]
    run = with_schedule(run, prompt_chunk_tokens=24)
    assert ranks.run(Layout(), _tensors_left, schedule, run, glm_groups()) == [[]]


def _values_left(run: RunConfig) -> dict[int, list[str]]:
    """Names of the values that each layer still has of the longest prompt when its group ends."""
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    left: dict[int, list[str]] = {}
    check = PromptState.check_complete

    def note(self: PromptState) -> None:
        check(self)
        left.update({n: sorted(rows.values) for n, rows in self.layers().items() if isinstance(rows, OwnedRows)})

    with patch.object(PromptState, "check_complete", note):
        run_schedule("longstraw", build_ddp_model(run), glm_groups()[:1], run, rank_device())
    return left


DENSE, LATENT, INDEXED = ["key", "value"], ["latent"], ["index_key", "latent"]


@pytest.mark.parametrize(
    ("model", "layout", "changes", "left"),
    [
        ("dense", Layout(), {}, [{1: DENSE, 2: DENSE, 3: DENSE, 4: []}]),
        ("dense", Layout(pp=2), {}, [{1: DENSE, 2: DENSE}, {3: DENSE, 4: []}]),
        ("dense", Layout(), {"prompt_gradient": "detached"}, [dict.fromkeys((1, 2, 3, 4), DENSE)]),
        ("qwen36", Layout(), {}, [{4: []}]),
        ("glm52", Layout(), {}, [{**dict.fromkeys((1, 2, 3, 4), LATENT), 5: []}]),
        ("glm52", Layout(), {"keep_choices": False}, [{**dict.fromkeys((1, 2, 3), INDEXED), 4: LATENT, 5: []}]),
        ("glm52 of seven layers", Layout(), {}, [{**dict.fromkeys(range(1, 7), LATENT), 7: []}]),
    ],
)
def test_prompt_backward_lets_go_what_it_does_not_read(
    ranks: Ranks, model: str, layout: Layout, changes: dict[str, Any], left: list[dict[int, list[str]]]
) -> None:
    """The last layer's rows, as prompt chunks compute no attention there (of seven, one that computes an index), and
    index keys where choices are kept."""
    of_seven = functools.partial(tiny_glm, **LAST_LAYER_CHOOSES)
    build = {"dense": tiny_run, "qwen36": qwen_run, "glm52": tiny_glm, "glm52 of seven layers": of_seven}[model]
    assert ranks.run(layout, _values_left, with_schedule(build(layout), **changes)) == left
