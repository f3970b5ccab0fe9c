"""Bodies for rank processes that run both schedules, and what tests make of the results."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_longstraw.compare import GATES
from megatron_longstraw.config import ModelConfig, ObjectiveConfig, ParallelConfig, RunConfig, ScheduleConfig
from megatron_longstraw.rollouts import Response, RolloutGroup
from tests.ranks import Layout

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),  # more ranks than KV heads: two share one
    Layout(pp=2),
    Layout(pp=4, vpp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2),
]

TINY = ModelConfig(
    vocab_size=256,
    transformer={
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "qk_layernorm": True,
    },
)
# sizes that divide nothing, so that every edge is met
UNEVEN = ScheduleConfig(prompt_chunk_tokens=32, page_tokens=7, attention_block_tokens=19, log_prob_block_tokens=5)


def tiny_run(layout: Layout, **changes: Any) -> RunConfig:
    parallel = ParallelConfig(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep)
    model = TINY
    if layout.pp * (layout.vpp or 1) > 4:
        model = replace(TINY, transformer={**TINY.transformer, "num_layers": 8})
    fields: dict[str, Any] = {"model": model, "parallel": parallel, "schedule": UNEVEN, "dtype": "float32"}
    return RunConfig(**{**fields, **changes})


def response(generator: np.random.Generator, n: int, mask: Sequence[int] | None = None, **fields: Any) -> Response:
    return Response(
        ids=generator.integers(0, 256, n),
        mask=np.ones(n, dtype=bool) if mask is None else np.array(mask, dtype=bool),
        reward=float(generator.normal()),
        **fields,
    )


def group(name: str, prompt: int, *responses: Response, seed: int = 0, temperature: float = 1.0) -> RolloutGroup:
    return RolloutGroup(
        group_id=name,
        prompt_ids=np.random.default_rng([seed, prompt]).integers(0, 256, prompt),
        responses=responses,
        temperature=temperature,
        meta=None,
        source=f"test:{name}",
    )


def edge_groups() -> list[RolloutGroup]:
    """Prompts about the chunk's length, responses of 0 and 1 tokens, loss in odd places; an uneven number."""
    g = np.random.default_rng(0)
    old = {"old_log_probs": -5.0 + 0.4 * g.normal(size=9), "ref_log_probs": -5.0 + 0.4 * g.normal(size=9)}
    return [
        group("uneven chunks", 101, response(g, 5), response(g, 1), response(g, 0), response(g, 17), temperature=0.7),
        group("one token", 1, response(g, 3), response(g, 4)),
        group("two tokens", 2, response(g, 6)),
        group("one chunk", 33, response(g, 6, [1, 1, 0, 0, 1, 1]), response(g, 4, [1, 0, 0, 0])),
        group("one chunk less", 32, response(g, 9, **old), response(g, 9, [0] * 9)),
        group("one chunk and one", 34, response(g, 2), response(g, 40)),
        group("nothing to do", 20, response(g, 0)),
    ]


@dataclass(frozen=True)
class FullParameter:
    """What a rank has of a parameter: enough to put the whole together."""

    name: str
    tensor: Tensor
    shard: Any


def join(ranks: Sequence[Sequence[FullParameter]]) -> dict[str, Tensor]:
    """The whole model from the parts of all ranks; parts that several ranks have must be the same on each."""
    parts: dict[str, dict[int, tuple[Tensor, Any]]] = {}
    for rank in ranks:
        for item in rank:
            tp_rank = item.shard.rank
            known = parts.setdefault(item.name, {}).setdefault(tp_rank, (item.tensor, item.shard))
            torch.testing.assert_close(
                item.tensor, known[0], rtol=1e-6, atol=1e-12, msg=f"{item.name} differs over DP or PP"
            )
    whole = {}
    for name, by_rank in parts.items():
        shard = by_rank[0][1]
        tensors = [by_rank[r][0] for r in sorted(by_rank)]
        if shard.dim is None:
            for tensor in tensors[1:]:
                torch.testing.assert_close(tensor, tensors[0], rtol=1e-5, atol=1e-9, msg=f"{name} differs over TP")
        whole[name] = shard.join(tensors)
    return whole


def rank_device() -> torch.device:
    """The device of a rank of tests.ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def two_steps(run: RunConfig, groups: list[RolloutGroup], plain_attention: str = "longstraw") -> dict[str, Any]:
    """Stock and ours from the same weights, then a plain gradient step by ours, and again.

    Returns:
        Per step the comparison, the largest difference of log-probs, both losses, both gradients' parts, the
        expert biases after both, and how index choices differed; and the initial weights' parts.
    """
    from megatron_longstraw.compare import compare_gradients, run_both
    from megatron_longstraw.models.parameters import named_buffers, named_parameters
    from megatron_longstraw.trainer import build_ddp_model, unwrapped

    device = rank_device()
    model = build_ddp_model(run, plain_attention=plain_attention)
    parameters = list(named_parameters(unwrapped(model)))
    shards = {p.name: p.shard for p in parameters}
    buffers = {b.name: b.tensor for b in named_buffers(unwrapped(model))}

    def parts(tensors: dict[str, Tensor]) -> list[FullParameter]:
        return [FullParameter(name, tensor.clone(), shards[name]) for name, tensor in tensors.items()]

    result: dict[str, Any] = {"weights": parts({p.name: p.parameter.detach().cpu() for p in parameters}), "steps": []}
    for _ in range(2):
        stock, ours, choices = run_both(model, groups, run, device)
        for name, buffer in buffers.items():
            buffer.copy_(ours.expert_bias[name])
        pairs = zip(ours.reports, stock.reports, strict=True)
        result["steps"].append(
            {
                "comparison": compare_gradients(ours.gradients, stock.gradients, GATES[run.dtype]),
                "log_probs": [(a["log_probs"] - b["log_probs"]).abs().max().item() for a, b in pairs],
                "loss": (stock.loss, ours.loss),
                "stock": parts(stock.gradients),
                "ours": parts(ours.gradients),
                "stock_buffers": stock.expert_bias,
                "buffers": ours.expert_bias,
                "index_choices": choices,
            }
        )
        for p in parameters:
            p.parameter.data.sub_(ours.gradients[p.name].to(p.parameter), alpha=0.5)
    return result


LOG_PROBS = {"float32": 5e-6, "float64": 1e-13}
"""Bounds on log-probs near -5.5: float32's spacing there is 5e-7."""


def check_steps(results: list[dict[str, Any]], dtype: str = "float64") -> None:
    """Both steps of `two_steps` on every rank: gradients within the gate, log-probs and losses within LOG_PROBS,
    index choices at ties only, expert biases bit for bit."""
    for step, rank in itertools.product((0, 1), range(len(results))):
        outcome = results[rank]["steps"][step]
        assert outcome["comparison"]["passed"], (step, rank, outcome["comparison"])
        assert all(difference <= LOG_PROBS[dtype] for difference in outcome["log_probs"]), outcome["log_probs"]
        stock, ours = outcome["loss"]
        assert abs(stock - ours) <= LOG_PROBS[dtype]
        assert outcome["index_choices"]["largest_gap"] <= GATES[dtype].tie, outcome["index_choices"]
        assert outcome["buffers"].keys() == outcome["stock_buffers"].keys()
        for name, bias in outcome["buffers"].items():
            assert torch.equal(bias, outcome["stock_buffers"][name]), name


def check_same(got: dict[str, Tensor], want: dict[str, Tensor], dtype: str = "float64") -> None:
    """Two whole gradients: the per-parameter bounds of the gate."""
    gate = GATES[dtype]
    assert got.keys() == want.keys()
    whole = torch.cat([w.flatten() for w in want.values()]).norm()
    for name in want:
        apart = (got[name] - want[name]).norm()
        assert apart <= gate.relative * want[name].norm() + gate.floor * whole, (name, apart)


def check_ours(got: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Ours of a run of `two_steps` in float64: stock's gradients on one rank, in both steps."""
    for step in (0, 1):
        want = join([result["steps"][step]["stock"] for result in alone])
        check_same(join([result["steps"][step]["ours"] for result in got]), want)


def check_equal(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """Ours of two runs of `two_steps`: the same bits on every rank, in both steps."""
    for rank, step in itertools.product(range(len(want)), (0, 1)):
        pairs = zip(*(results[rank]["steps"][step]["ours"] for results in (got, want)), strict=True)
        for a, b in pairs:
            assert a.name == b.name
            assert torch.equal(a.tensor, b.tensor), (rank, step, a.name)


def with_schedule(run: RunConfig, **changes: Any) -> RunConfig:
    return replace(run, schedule=replace(run.schedule, **changes))


def with_objective(run: RunConfig, **changes: Any) -> RunConfig:
    return replace(run, objective=ObjectiveConfig(**changes))
