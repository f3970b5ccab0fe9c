"""The product: gradients of ours are the stock schedule's, on every layout, and every layout's are one rank's."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from megatron_longstraw.config import ConfigError, RunConfig
from megatron_longstraw.work import WorkItem
from tests.exactness import (
    LAYOUTS,
    LOG_PROBS,
    check_equal,
    check_ours,
    check_same,
    check_steps,
    edge_groups,
    join,
    tiny_run,
    two_steps,
    with_objective,
    with_schedule,
)
from tests.ranks import Layout, Ranks


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[[RunConfig], list[dict[str, Any]]]:
    """The results of one rank for the model and dtype of a run, computed once."""

    @functools.cache
    def results(layers: int, dtype: str) -> list[dict[str, Any]]:
        run = tiny_run(Layout(), dtype=dtype)
        transformer = {**run.model.transformer, "num_layers": layers}
        run = replace(run, model=replace(run.model, transformer=transformer))
        return ranks.run(Layout(), two_steps, run, edge_groups())

    return lambda run: results(run.model.transformer["num_layers"], run.dtype)


# float64 sees more, so float32 on several ranks is left to `make test-slow`
CASES = [
    pytest.param(layout, dtype, id=f"{layout}-{dtype}", marks=[pytest.mark.slow] * (dtype == "float32" and n > 1))
    for layout in LAYOUTS
    for dtype in ("float64", "float32")
    for n in [layout.world_size]
]


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_two_steps_equal_stock_and_one_rank(
    ranks: Ranks, one_rank: Callable[[RunConfig], list[dict[str, Any]]], layout: Layout, dtype: str
) -> None:
    run = tiny_run(layout, dtype=dtype)
    alone = one_rank(run)
    results = alone if layout == Layout() else ranks.run(layout, two_steps, run, edge_groups())
    check_steps(results, dtype)
    weights = join([r["weights"] for r in results])
    for name, tensor in join([r["weights"] for r in alone]).items():
        assert torch.equal(weights[name], tensor), name
    for step, side in itertools.product((0, 1), ("stock", "ours")):
        want = join([r["steps"][step]["stock"] for r in alone])
        check_same(join([r["steps"][step][side] for r in results]), want, dtype)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), pytest.param(Layout(tp=4), marks=pytest.mark.slow)], ids=str
)
def test_megatrons_own_attention_agrees(ranks: Ranks, layout: Layout) -> None:
    """The stock side with Megatron's DotProductAttention, which shares no code with ours."""
    results = ranks.run(layout, two_steps, tiny_run(layout, dtype="float64"), edge_groups()[:3], "megatron")
    check_steps(results, "float64")


@pytest.mark.parametrize("chunk", [3, 32, 100, 101, 4096])
def test_chunk_and_page_sizes_change_nothing(
    ranks: Ranks, one_rank: Callable[[RunConfig], list[dict[str, Any]]], chunk: int
) -> None:
    run = with_schedule(
        tiny_run(Layout(), dtype="float64"),
        prompt_chunk_tokens=chunk,
        page_tokens=chunk + 2,
        log_prob_block_tokens=chunk,
    )
    results = ranks.run(Layout(), two_steps, run, edge_groups())
    check_steps(results, "float64")
    check_ours(results, one_rank(run))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2),
        Layout(pp=2),
        *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[2:] if x.pp != 2),
    ],
    ids=str,
)
def test_packing_responses_changes_nothing(
    ranks: Ranks, one_rank: Callable[[RunConfig], list[dict[str, Any]]], layout: Layout
) -> None:
    """Packs of two, also behind a prompt of one token, and of one that is longer than a pack; 18 tokens of 9 + 9."""
    run = with_schedule(tiny_run(layout, dtype="float64"), pack_tokens=20)
    results = ranks.run(layout, two_steps, run, edge_groups())
    check_steps(results, "float64")
    check_ours(results, one_rank(run))


def test_without_recomputation(ranks: Ranks) -> None:
    run = with_schedule(tiny_run(Layout(pp=2), dtype="float64"), recompute=False)
    check_steps(ranks.run(Layout(pp=2), two_steps, run, edge_groups()), "float64")


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=2), pytest.param(Layout(tp=4), marks=pytest.mark.slow)], ids=str
)
def test_keeping_attention_changes_no_bit(ranks: Ranks, layout: Layout) -> None:
    runs = [with_schedule(tiny_run(layout), keep_attention=keep) for keep in (True, False)]
    check_equal(*(ranks.run(layout, two_steps, run, edge_groups()) for run in runs))


@pytest.mark.parametrize(
    "objective",
    [
        {"loss_agg_mode": "seq-mean-token-mean", "entropy_coef": 0.1},
        {"loss_agg_mode": "seq-mean-token-sum", "clip_ratio_high": 0.28},
    ],
    ids=["entropy", "sequences"],
)
def test_objectives(ranks: Ranks, objective: dict[str, Any]) -> None:
    run = with_objective(tiny_run(Layout(), dtype="float64"), **objective)
    check_steps(ranks.run(Layout(), two_steps, run, edge_groups()), "float64")


@pytest.mark.parametrize("changes", [{"tie_embeddings": True}, {"rotary_percent": 0.5}], ids=["tied", "partial RoPE"])
def test_model_variants(ranks: Ranks, changes: dict[str, Any]) -> None:
    """Each layout equals stock, and one rank; the last pipeline stage's copy of a tied embedding stays a copy."""
    by_layout = []
    layouts = [Layout(), Layout(tp=2), Layout(pp=2)] if "tie_embeddings" in changes else [Layout()]
    for layout in layouts:
        run = tiny_run(layout, dtype="float64")
        run = replace(run, model=replace(run.model, **changes))
        by_layout.append(ranks.run(layout, two_steps, run, edge_groups()[:4]))
        check_steps(by_layout[-1], "float64")
    want = [join([r["steps"][step]["ours"] for r in by_layout[0]]) for step in (0, 1)]
    for results in by_layout[1:]:
        for step in (0, 1):
            check_same(join([r["steps"][step]["ours"] for r in results]), want[step], "float64")


def test_gated_biased_layernorm_model_without_sequence_parallelism(ranks: Ranks) -> None:
    run = tiny_run(Layout(tp=2))
    transformer = {**run.model.transformer, "normalization": "LayerNorm", "add_bias_linear": True}
    transformer |= {"gated_linear_unit": False, "activation_func": "gelu", "attention_output_gate": True}
    run = replace(
        run,
        model=replace(run.model, transformer=transformer),
        parallel=replace(run.parallel, sequence_parallel=False),
    )
    check_steps(ranks.run(Layout(tp=2), two_steps, run, edge_groups()[:4]), "float32")


def test_detached_is_another_gradient(ranks: Ranks) -> None:
    run = with_schedule(tiny_run(Layout(), dtype="float64"), prompt_gradient="detached")
    step = ranks.run(Layout(), two_steps, run, edge_groups())[0]["steps"][0]
    assert max(step["log_probs"]) <= LOG_PROBS["float64"]  # the forward is the same
    assert not step["comparison"]["passed"]
    assert step["comparison"]["relative_l2"] > 0.01


def _bfloat16() -> list[float]:
    from megatron_longstraw.compare import run_schedule
    from megatron_longstraw.trainer import build_ddp_model

    device = torch.device("cpu")
    gradients = {}
    for dtype, schedule in (("float64", "stock"), ("bfloat16", "stock"), ("bfloat16", "longstraw")):
        run = tiny_run(Layout(tp=2), dtype=dtype)
        outcome = run_schedule(schedule, build_ddp_model(run), edge_groups(), run, device)
        gradients[dtype, schedule] = torch.cat([g.double().flatten() for g in outcome.gradients.values()])
    true = gradients.pop(("float64", "stock"))
    return [((g - true).norm() / true.norm()).item() for g in gradients.values()]


def test_bfloat16_is_no_farther_from_float64_than_stock(ranks: Ranks) -> None:
    """Rounding of the weights alone puts both at about 1 %; ours must add nothing of its own."""
    for stock, ours in ranks.run(Layout(tp=2), _bfloat16):
        assert ours <= 1.2 * stock <= 0.1, (stock, ours)


def _forward_only() -> list[float]:
    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups

    run = tiny_run(Layout(tp=2), dtype="float64")
    model = build_ddp_model(run)
    groups = prompt_groups(edge_groups(), run, torch.device("cpu"))
    step = grpo_forward_step(run, keep_log_probs=True)
    arguments = {"forward_step_func": step, "model": model, "num_microbatches": len(groups), "options": run.schedule}
    for chunk in model:
        chunk.zero_grad_buffer()
    scored = forward_backward(data_iterator=iter(groups), forward_only=True, **arguments)
    assert all(not p.main_grad.any() for chunk in model for p in chunk.parameters())
    trained = forward_backward(data_iterator=iter(groups), **arguments)
    return [(a["log_probs"] - b["log_probs"]).abs().max().item() for a, b in zip(scored, trained, strict=True)]


def test_forward_only_scores_without_gradients(ranks: Ranks) -> None:
    for differences in ranks.run(Layout(tp=2), _forward_only):
        assert differences and max(differences) == 0


def _micro_batches(pack_tokens: int) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """(phase, responses) of each micro-batch of one group, and how many reports there are."""
    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups

    class Notes:
        seen: ClassVar[list[tuple[str, tuple[int, ...]]]] = []

        def on_item(self, item: WorkItem) -> None:
            self.seen.append((item.segment.phase.value, item.responses))

        def on_group_end(self, state: Any) -> None: ...

    run = with_schedule(tiny_run(Layout()), pack_tokens=pack_tokens)
    reports = forward_backward(
        forward_step_func=grpo_forward_step(run),
        data_iterator=iter(prompt_groups(edge_groups()[:1], run, torch.device("cpu"))),
        model=build_ddp_model(run),
        num_microbatches=1,
        options=run.schedule,
        observer=Notes(),
    )
    return Notes.seen, len(reports)


@pytest.mark.parametrize(("pack_tokens", "packs"), [(0, [(0,), (1,), (3,)]), (6, [(0, 1), (3,)]), (99, [(0, 1, 3)])])
def test_responses_are_packed_as_the_setting_says(ranks: Ranks, pack_tokens: int, packs: list[tuple[int, ...]]) -> None:
    """Four prompt chunks; responses of 5, 1, 0 and 17 tokens."""
    ((seen, reports),) = ranks.run(Layout(), _micro_batches, pack_tokens)
    assert seen == [("capture", ())] * 4 + [("response", pack) for pack in packs] + [("prompt", ())] * 4
    assert reports == 3


def _loss_functions(returned: list[Any]) -> list[str]:
    """What is said of loss functions that return these reports for a pack of two responses."""
    from megatron_longstraw.schedule import forward_backward
    from megatron_longstraw.trainer import build_ddp_model, grpo_forward_step, prompt_groups

    run = with_schedule(tiny_run(Layout()), pack_tokens=6)
    model, inner = build_ddp_model(run), grpo_forward_step(run)
    said = []
    for reports in returned:

        def step(items: Any, chunk: Any, reports: Any = reports) -> Any:
            output, loss_func = inner(items, chunk)
            return output, lambda x: (loss_func(x)[0], reports)

        groups = iter(prompt_groups(edge_groups()[:1], run, torch.device("cpu")))
        arguments = {"data_iterator": groups, "model": model, "num_microbatches": 1, "options": run.schedule}
        with pytest.raises(ConfigError) as error:
            forward_backward(forward_step_func=step, **arguments)
        said.append(str(error.value))
    return said


def test_a_loss_function_reports_each_response(ranks: Ranks) -> None:
    (said,) = ranks.run(Layout(), _loss_functions, [{"loss": 1.0}, [1.0], torch.zeros(())])
    wanted = "the loss function needs to return (loss, list of 2 reports): got"
    assert said == [f"{wanted} a dict", f"{wanted} 1", f"{wanted} a Tensor"]


def _refuse(setting: str, value: Any) -> str:
    from megatron_longstraw.schedule import check_model
    from megatron_longstraw.trainer import build_ddp_model

    model = build_ddp_model(tiny_run(Layout()))
    target = model[0].ddp_config if hasattr(model[0].ddp_config, setting) else model[0].config
    setattr(target, setting, value)
    try:
        check_model(model)
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("recompute_granularity", "full"),
        ("context_parallel_size", 2),
        ("calculate_per_token_loss", False),
        ("variable_seq_lengths", False),
        ("overlap_grad_reduce", True),
        ("overlap_param_gather", True),
        ("grad_sync_func", print),
        ("fp8", "hybrid"),
        ("cuda_graph_impl", "local"),
        ("tp_comm_overlap", True),
        ("defer_embedding_wgrad_compute", True),
    ],
)
def test_settings_of_a_host_are_refused_by_name(ranks: Ranks, setting: str, value: Any) -> None:
    (message,) = ranks.run(Layout(), _refuse, setting, value)
    assert setting in message
    assert "not supported" in message or "is set" in message
