"""GLM-5.2's choices of positions: prompt backward takes those of capture, bit for bit, whoever owns their rows.

What this does not exercise: NCCL.
"""

from collections import Counter, defaultdict
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_longstraw.config import RunConfig
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import group, rank_device, response, with_schedule
from tests.glm52 import glm_groups, tiny_glm
from tests.ranks import Layout, Ranks

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, ep=2)]
TOPK = 8
PAGE = 5
STARTS = {0: 7, 7: 7, 14: 7, 21: 4}
"""Start of each prompt chunk of `_group` -> its tokens; on two ranks each of 7 is padded by one."""


def _group() -> list[RolloutGroup]:
    """A prompt of which 25 tokens are captured, and two responses."""
    return glm_groups()[2:]


def _choice_bytes(tp: int, topk: int = TOPK) -> int:
    """Of a layer and rank: for each token of its share of each chunk two bytes a position, of as many as a token of
    the chunk may choose, and their number."""
    return sum(-(-tokens // tp) * (min(topk, start + tokens) * 2 + 4) for start, tokens in STARTS.items())


def _positions(chosen: list[list[int]], start: int, layout: Layout) -> list[list[int]]:
    """The positions that chosen rows hold: one owner's pages of the prompt after the other's, then the chunk's."""
    owned = [[p for p in range(start) if p // PAGE % layout.tp == owner] for owner in range(layout.tp)]
    missing = [[None] * (len(owned[0]) - len(own)) for own in owned]
    held = [p for own, none in zip(owned, missing, strict=True) for p in own + none]
    held += range(start, start + 8)
    return [[held[row] if row >= 0 else -1 for row in rows] for rows in chosen]


def _uneven(layout: Layout, **schedule: Any) -> RunConfig:
    return with_schedule(tiny_glm(layout), prompt_chunk_tokens=7, page_tokens=PAGE, **schedule)


def _observe(run: RunConfig, groups: list[RolloutGroup], bits: int = 16) -> dict[str, Any]:
    """One pass of ours, with so many bits kept of a position: how often positions are chosen in each phase, the
    rows that each layer's attention takes (by phase, then by layer and start; "again" are recomputed layers),
    what comes out, and bytes."""
    from megatron_longstraw import kept_choices
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.models import mla
    from megatron_longstraw.trainer import build_ddp_model, unwrapped

    model = build_ddp_model(run)
    runtime = unwrapped(model)[0].runtime
    choose, attend = mla.choose_positions, mla.PromptSparseAttention._sparse
    counts: Counter[str] = Counter()
    taken: dict[str, dict[tuple[int, int], list[list[int]]]] = defaultdict(dict)

    def count(*args: Any, **options: Any) -> Tensor:
        counts[runtime.segment.phase.value] += 1
        return choose(*args, **options)

    def note(self: Any, q: Tensor, latent: Tensor, chosen: Tensor, prompt: Any) -> Tensor:
        phase = "again" if runtime.micro_batch.is_recomputed else runtime.segment.phase.value
        taken[phase][self.layer_number, runtime.segment.start] = chosen.tolist()
        return attend(self, q, latent, chosen, prompt)

    with (
        patch.object(mla, "choose_positions", count),
        patch.object(mla.PromptSparseAttention, "_sparse", note),
        patch.object(kept_choices, "_BITS", bits),
    ):
        result = run_schedule("longstraw", model, groups, run, rank_device())
    return {
        "counts": dict(counts),
        "taken": dict(taken),
        "outputs": [result.loss, *(report["log_probs"] for report in result.reports)],
        "gradients": result.gradients,
        "bytes": result.state_bytes,
        "peak": result.peak_bytes,
    }


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), Layout(tp=2, ep=2), *(pytest.param(x, marks=pytest.mark.slow) for x in (Layout(), Layout(tp=2)))],
    ids=str,
)
def test_keeping_choices_changes_no_bit(ranks: Ranks, layout: Layout) -> None:
    kept, anew = (ranks.run(layout, _observe, _uneven(layout, keep_choices=k), glm_groups()) for k in (True, False))
    for a, b in zip(kept, anew, strict=True):
        assert any(gradient.any() for gradient in b["gradients"].values())
        for part in ("outputs", "gradients"):
            torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)


def test_positions_beyond_the_kept_bits_come_back(ranks: Ranks) -> None:
    """As those beyond 65,536, here beyond 16: padding of the last chunk too, that chooses position 48, itself."""
    layout, generator = Layout(tp=2), np.random.default_rng(2)
    groups = [group("48 captured", 49, response(generator, 3), response(generator, 2))]
    runs = [with_schedule(tiny_glm(layout), prompt_chunk_tokens=5, keep_choices=keep) for keep in (True, False)]
    kept, anew = (ranks.run(layout, _observe, run, groups, 4) for run in runs)
    for a, b in zip(kept, anew, strict=True):
        assert all(gradient.isfinite().all() for gradient in b["gradients"].values())
        torch.testing.assert_close(a["gradients"], b["gradients"], rtol=0, atol=0)
        assert a["taken"]["prompt"] == b["taken"]["prompt"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_prompt_backward_takes_what_capture_chose(ranks: Ranks, layout: Layout) -> None:
    """Layers that reuse a choice and recomputed ones, too; a row of padding chooses itself alone. Each rank has its
    share of a chunk's tokens: every tp-th."""
    for rank, result in enumerate(ranks.run(layout, _observe, _uneven(layout), _group())):
        captured, prompt, again = (result["taken"][phase] for phase in ("capture", "prompt", "again"))
        assert prompt == {key: chosen for key, chosen in again.items() if key[1] in STARTS}
        assert prompt.keys() == {key for key in captured if key[0] < 5}  # the last layer has no attention here
        assert {start for _, start in prompt} == STARTS.keys()
        for (layer, start), rows in prompt.items():
            chosen = _positions(rows, start, layout)
            width = min(TOPK, start + STARTS[start])
            tokens = range(rank % layout.tp, STARTS[start] + STARTS[start] % layout.tp, layout.tp)
            padding = [[start + t] + [-1] * (width - 1) for t in tokens if t >= STARTS[start]]
            own = _positions(captured[layer, start][: len(tokens) - len(padding)], start, layout)
            assert chosen == own + padding, (layer, start)
            assert all(start + t in row for t, row in zip(tokens, own, strict=False) if start + t < TOPK)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "anew"])
@pytest.mark.parametrize("layers", [5, 7], ids=["last_reuses", "last_computes"])
def test_prompt_backward_chooses_nothing(ranks: Ranks, keep: bool, layers: int) -> None:
    """Of seven layers the last one computes an index; its choice for prompt tokens is of no use, and never made."""
    transformer = {"num_layers": layers, "moe_layer_freq": [0] * (layers - 1) + [1]}
    run = with_schedule(tiny_glm(Layout(), **transformer), prompt_chunk_tokens=7, keep_choices=keep)
    (result,) = ranks.run(Layout(), _observe, run, _group())
    computing = {5: 3, 7: 4}[layers]
    counts = {"capture": len(STARTS) * computing, "response": 2 * computing}
    assert result["counts"] == (counts if keep else {**counts, "prompt": len(STARTS) * 3})
    assert result["bytes"] == 25 * 8 * (layers * 24 + computing * 12) + keep * 3 * _choice_bytes(1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("gradient", ["exact", "detached"])
def test_state_bytes_are_those_of_the_formula(ranks: Ranks, layout: Layout, gradient: str) -> None:
    """Float64 latents of 24 and index keys of 12, on 3 of 5 layers; 8 positions of two bytes for each of these 3."""
    results = ranks.run(layout, _observe, _uneven(layout, prompt_gradient=gradient), _group())
    stages = [(5, 3)] if layout.pp == 1 else [(2, 2), (3, 1)]  # layers, and those of them that compute an index
    owned = [sum(p // 5 % layout.tp == rank for p in range(25)) for rank in range(layout.tp)]
    choices = _choice_bytes(layout.tp) if gradient == "exact" else 0
    want = [8 * rows * (24 * n + 12 * computing) + choices * computing for n, computing in stages for rows in owned]
    assert [result["bytes"] for result in results] == want


def test_choices_are_no_wider_than_the_prompt(ranks: Ranks) -> None:
    """64 positions are more than the 25 that there are; on two ranks each chunk of 7 is padded by one."""
    layout = Layout(tp=2)
    runs = [
        with_schedule(tiny_glm(layout, dsa_indexer_topk=64), prompt_chunk_tokens=7, keep_choices=keep)
        for keep in (True, False)
    ]
    for kept, anew in zip(*(ranks.run(layout, _observe, run, _group()) for run in runs), strict=True):
        torch.testing.assert_close(kept["gradients"], anew["gradients"], rtol=0, atol=0)
        assert kept["bytes"] - anew["bytes"] == 3 * _choice_bytes(layout.tp, topk=64)


def test_choices_cost_their_bytes_and_let_index_keys_go(ranks: Ranks) -> None:
    """The peak is in backward of the second of three chunks: what is left then is the first chunk's, of 24 tokens
    that chose from 24 positions, on 3 layers; the prompt's 66 index keys of 12 on these layers are of no use."""
    runs = [with_schedule(tiny_glm(Layout(), dsa_indexer_topk=64), keep_choices=keep) for keep in (True, False)]
    kept, anew = (ranks.run(Layout(), _observe, run, glm_groups())[0]["peak"] for run in runs)
    assert kept - anew == 3 * 24 * (24 * 2 + 4) - 3 * 66 * 12 * 8
