"""Counted operations against formulas by hand, and against torch's own counter."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_longstraw.config import RunConfig, ScheduleConfig
from megatron_longstraw.flops import FlopCounter
from tests.exactness import group, response, tiny_run
from tests.ranks import Layout, Ranks

PROMPT, RESPONSE, GROUP = 60, 7, 3


def _run(prompt_gradient: Any, **changes: Any) -> RunConfig:
    schedule = ScheduleConfig(prompt_chunk_tokens=16, prompt_gradient=prompt_gradient)
    return replace(tiny_run(Layout()), schedule=replace(schedule, **changes))


def _count(name: str, run: RunConfig, recompute: bool = True, prompt: int = PROMPT) -> int:
    from megatron_longstraw.compare import run_step
    from megatron_longstraw.trainer import build_ddp_model

    draw = np.random.default_rng(0)
    rollouts = [group("g", prompt, *(response(draw, RESPONSE) for _ in range(GROUP)))]
    counter = FlopCounter()
    run_step(name, build_ddp_model(run), rollouts, run, torch.device("cpu"), recompute=recompute, within=counter)
    return counter.total


def _formula(
    forwards: int, backwards: int, tokens: int, pairs: int, *, last: bool = True, attended: int | None = None
) -> int:
    """Operations of the tiny model's four layers; of the last one all, or its QKV and output projections only.

    Attention may run forward another number of times than the rest.
    """
    layers = 4
    hidden, ffn, heads, kv_heads, dim = 32, 48, 4, 2, 8
    attention_weights = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
    weights = layers * attention_weights + (layers if last else layers - 1) * 3 * hidden * ffn
    products = 2 * weights * tokens * (forwards + 2 * backwards)
    attended = forwards if attended is None else attended
    return products + heads * pairs * dim * (4 * attended + 10 * backwards) * (layers if last else layers - 1)


def test_a_dense_step_by_hand(ranks: Ranks) -> None:
    """Four layers, 256 rows of the output layer, each response's logits once more in backward."""
    head = GROUP * 2 * RESPONSE * 32 * 256 * 4
    length, prompt = PROMPT + RESPONSE - 1, PROMPT - 1
    whole = length * (length + 1) // 2
    behind = RESPONSE * (RESPONSE + 1) // 2 + RESPONSE * prompt
    of_prompt = prompt * (prompt + 1) // 2

    def count(name: str, run: RunConfig, recompute: bool = True) -> int:
        return ranks.run(Layout(), _count, name, run, recompute)[0]

    assert count("stock", _run("exact"), False) == head + GROUP * _formula(1, 1, length, whole)
    assert count("stock", _run("exact"), True) == head + GROUP * _formula(2, 1, length, whole)
    capture = head + _formula(1, 0, prompt, of_prompt, last=False)
    for keep, attended in ((True, 1), (False, 2)):
        replay = GROUP * _formula(2, 1, RESPONSE, behind, attended=attended)
        backward = _formula(2, 1, prompt, of_prompt, last=False, attended=attended)
        assert count("longstraw", _run("detached", keep_attention=keep)) == capture + replay
        assert count("longstraw", _run("exact", keep_attention=keep)) == capture + replay + backward
    replay = GROUP * _formula(1, 1, RESPONSE, behind)
    backward = _formula(1, 1, prompt, of_prompt, last=False)
    assert count("longstraw", _run("exact", recompute=False)) == capture + replay + backward


def test_short_micro_batches_are_not_recomputed(ranks: Ranks) -> None:
    """A response of 7 tokens in 4 layers keeps half of what a prompt chunk of 56 with a graph does in one; whatever
    could be."""

    def saved(chunk: int, prompt: int, gradient: str = "exact") -> int:
        counts = [
            ranks.run(Layout(), _count, "longstraw", _run(gradient, prompt_chunk_tokens=n), True, prompt)[0]
            for n in (16, chunk)
        ]
        return counts[0] - counts[1]

    again = GROUP * _formula(1, 0, RESPONSE, 0, attended=0)
    assert [saved(55, 56), saved(56, 57), saved(1000, 57), saved(1000, 56)] == [0, again, again, 0]
    assert saved(56, 57, "detached") == 0


def test_products_as_torch_counts_them() -> None:
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, 4)
    image, kernel = torch.randn(1, 6, 11), torch.randn(6, 1, 4, requires_grad=True)
    totals = []
    for counter in (FlopCounter(), FlopCounterMode(display=False)):
        with counter:
            ((a @ b).sum() + torch.nn.functional.conv1d(image, kernel, groups=6).sum()).backward()
        totals.append(counter.total if isinstance(counter, FlopCounter) else counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_product_added_in_place() -> None:
    with FlopCounter() as counter:
        torch.zeros(2, 5).addmm_(torch.ones(2, 3), torch.ones(3, 5))
    assert counter.total == 2 * 2 * 3 * 5
