"""A host's own forward step, loss and samples: ours gives stock's gradients, reports and scales."""

import functools
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_longstraw import drop_in
from megatron_longstraw.config import ConfigError
from megatron_longstraw.distributed import PeerError
from megatron_longstraw.prompt_state import Phase, Segment
from megatron_longstraw.samples import group_samples, read_sample
from megatron_longstraw.work import WorkItem
from tests.exactness import UNEVEN, rank_device, tiny_run
from tests.hosts import (
    LENGTH,
    build_host,
    edge_samples,
    forward_step,
    logits_forward_step,
    pair_loss,
    sample,
    triple_loss,
)
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT

LOSSES = {
    "triple": (forward_step, triple_loss, False),
    "pair": (forward_step, pair_loss, False),
    "per token": (forward_step, triple_loss, True),
    "logits": (logits_forward_step, triple_loss, False),
}
"""Forward step, loss function, calculate_per_token_loss."""


def _two_steps(layout: Layout, adopted: bool, loss: str) -> list[dict[str, Any]]:
    """Stock and ours from the same weights, then a plain gradient step, and again; what each step gave."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

    import megatron_longstraw
    from megatron_longstraw.compare import GATES, compare_gradients
    from megatron_longstraw.float64 import keep_float64
    from megatron_longstraw.models.parameters import named_parameters
    from megatron_longstraw.trainer import unwrapped

    forward, loss_func, per_token = LOSSES[loss]
    step: Any = functools.partial(forward, loss_func)
    step.longstraw_reads_every_rank = True
    run = tiny_run(layout, dtype="float64")
    model = build_host(run, adopted=adopted, per_token=per_token)
    samples = edge_samples(parallel_state.get_data_parallel_rank())
    names = [(p.name, p.parameter) for p in named_parameters(unwrapped(model))]

    def gradients(schedule: Any, forward_only: bool = False, iterate: Any = iter) -> tuple[dict[str, Any], list[Any]]:
        for chunk in model:
            chunk.zero_grad_buffer()
        with keep_float64():
            reports = schedule(
                forward_step_func=step,
                data_iterator=[iterate(samples) for _ in model] if layout.vpp else iterate(samples),
                model=model,
                num_microbatches=len(samples),
                seq_length=LENGTH,
                micro_batch_size=1,
                forward_only=forward_only,
                force_all_reduce=True,
            )
        return {name: p.main_grad.detach().clone() for name, p in names}, reports

    # as with Megatron's loaders: on the first tensor-parallel rank only
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    ours_alone = functools.partial(gradients, iterate=lambda s: iter(s) if first else None)
    results = []
    for _ in range(2):
        stock, stock_reports = gradients(megatrons())
        ours, reports = ours_alone(megatron_longstraw.get_forward_backward_func(options=UNEVEN))
        none, evaluated = ours_alone(megatron_longstraw.get_forward_backward_func(options=UNEVEN), forward_only=True)
        results.append(
            {
                "comparison": compare_gradients(ours, stock, GATES["float64"]),
                "norm": sum(float(g.square().sum()) for g in stock.values()),
                "evaluation leaves gradients": any(bool(g.any()) for g in none.values()),
                "reports": [[r["lm loss"].tolist() for r in each] for each in (stock_reports, reports, evaluated)],
            }
        )
        for name, p in names:
            p.data.sub_(ours[name], alpha=0.05)
    return results


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),  # two ranks share a KV head
    Layout(pp=2),
    Layout(pp=4, vpp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2),
]
# by default each loss and each layout of two ranks once; all of the product take minutes
DEFAULT = {
    *((Layout(), True, loss) for loss in LOSSES),
    (Layout(tp=2), False, "triple"),
    (Layout(pp=2), True, "per token"),
    (Layout(dp=2), True, "pair"),
}
CASES = [
    pytest.param(*case, id="-".join(map(str, (case[0], "adopted" if case[1] else "built", case[2]))), marks=marks)
    for case in itertools.product(LAYOUTS, (True, False), LOSSES)
    if case[2] != "logits" or case[0].tp == 1  # ranks have a part of the vocabulary each
    for marks in [() if case in DEFAULT else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("layout", "adopted", "loss"), CASES)
def test_two_steps_equal_stock(ranks: Ranks, layout: Layout, adopted: bool, loss: str) -> None:
    results = ranks.run(layout, _two_steps, layout, adopted, loss)
    reported = 0
    for rank in results:
        for step in rank:
            assert step["norm"] > 0
            assert step["comparison"]["passed"], step["comparison"]
            assert not step["evaluation leaves gradients"]
            stock, ours, evaluated = step["reports"]
            assert len(stock) == len(ours) == len(evaluated)
            torch.testing.assert_close(ours, stock, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(evaluated, stock, rtol=1e-11, atol=1e-12)
            reported += len(ours)
    assert reported >= 2 * 7 * layout.tp  # by the last stages: two steps of samples


def test_equal_prompts_make_groups() -> None:
    samples = [read_sample(batch, "batch") for batch in edge_samples()]
    groups = group_samples(samples)
    assert [list(g.payload.places) for g in groups] == [[0, 2, 5], [1, 6], [3], [4], [7]]
    assert [len(g.prompt) for g in groups] == [37, 9, 1, 1, 11]
    assert [[len(r) for r in g.responses] for g in groups] == [[5, 6, 1], [1, 56], [1], [4], [4]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": None}, ["no tensor 'loss_mask'", "[1, S]"]),
        ({"tokens": torch.zeros(2, LENGTH, dtype=torch.int64)}, [f"[2, {LENGTH}]", "micro-batch size to 1"]),
        ({"advantages": torch.zeros(1, LENGTH - 1)}, ["advantages", f"[1, {LENGTH - 1}]", f"[1, {LENGTH}]"]),
        ({"advantages": torch.zeros(LENGTH)}, ["advantages", f"[{LENGTH}]"]),
        ({"loss_mask": torch.ones(1)}, ["loss_mask has shape [1]", f"[1, {LENGTH}]"]),
        ({"cu_seqlens": torch.tensor([0, 3])}, ["cu_seqlens", "packed"]),
        ({"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH)}, ["attention_mask", "causal"]),
        ({"attention_mask": torch.zeros(1, 1, 1, LENGTH)}, ["attention_mask", f"[1, 1, 1, {LENGTH}]"]),
    ],
    ids=["no mask", "two samples", "short field", "flat field", "one mask", "packed", "bidirectional", "padding"],
)
def test_batches_are_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_sample({**sample([1, 2], [3]), **changes}, "batch 3")
    assert all(word in str(error.value) for word in ["batch 3", *words]), error.value


def test_a_mask_that_is_causal_is_let_go() -> None:
    assert read_sample(sample([1, 2], [3]), "batch 0").fields["attention_mask"] is None


def test_a_tuple_is_no_batch() -> None:
    with pytest.raises(ConfigError, match="is a tuple: needs a mapping"):
        read_sample((torch.zeros(1, 3),), "batch 0")


def _refusals() -> list[str]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    import megatron_longstraw
    from megatron_longstraw.integrations.megatron import adopt
    from megatron_longstraw.models import transformer_config

    run = tiny_run(Layout())
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")

    def model(cls: type = GPTModel, **changes: Any) -> Any:
        arguments = {"vocab_size": 256, "max_sequence_length": 8, "position_embedding_type": "rope", **changes}
        return cls(config=transformer_config(run), transformer_layer_spec=spec, **arguments)

    class OtherModel(GPTModel):
        pass

    recomputing = model()
    recomputing.config.recompute_granularity = "full"
    no_causal_mask = model()
    no_causal_mask.decoder.layers[2].self_attention.attn_mask_type = AttnMaskType.padding
    other_mlp = model()
    other_mlp.decoder.layers[1].mlp = torch.nn.Identity()
    schedule = megatron_longstraw.get_forward_backward_func()
    arguments = {"forward_step_func": print, "data_iterator": iter([]), "num_microbatches": 1}

    def run_loss(outputs: Any) -> None:
        forward = functools.partial(forward_step, lambda *_: outputs)
        schedule(
            forward_step_func=forward, data_iterator=iter(edge_samples()), model=adopt(model()), num_microbatches=1
        )

    def forward_of_another_batch(_: Any, chunk: Any) -> Any:
        return forward_step(triple_loss, iter(edge_samples()), chunk)

    sharded = model()
    assert sharded.config.gtp_weight_remat_size == sharded.config.expert_gtp_weight_remat_size == 1  # their names
    sharded.config.gtp_weight_remat_size = 2
    several_modules = MultiModuleProcessGroupCollection.__new__(MultiModuleProcessGroupCollection)
    two_stages = [adopt(model()), model()]
    two_stages[0].config.pipeline_model_parallel_size = 2
    calls = [
        lambda: adopt(model(OtherModel)),
        lambda: adopt(model(position_embedding_type="learned_absolute")),
        lambda: adopt(recomputing),
        lambda: adopt(no_causal_mask),
        lambda: adopt(other_mlp),
        lambda: schedule(model=model(), **arguments, micro_batch_size=2),
        lambda: schedule(model=model(), **{**arguments, "data_iterator": iter(edge_samples())}),
        lambda: schedule(model=adopt(model()), **{**arguments, "data_iterator": None}),
        lambda: schedule(model=adopt(model()), **{**arguments, "num_microbatches": 0}),
        lambda: megatron_longstraw.get_forward_backward_func(schedule_pg_collection=several_modules),
        lambda: schedule(model=two_stages, **arguments),
        lambda: run_loss((torch.zeros(()),)),
        lambda: run_loss(torch.zeros(())),
        lambda: adopt(sharded),
        lambda: schedule(
            forward_step_func=forward_of_another_batch,
            data_iterator=iter(edge_samples()),
            model=adopt(model()),
            num_microbatches=8,
        ),
        lambda: schedule(
            model=adopt(model()), **{**arguments, "data_iterator": iter(edge_samples()), "num_microbatches": 9}
        ),
        lambda: schedule(model=adopt(model()), **{**arguments, "data_iterator": edge_samples()}),
    ]
    messages = [_message(call) for call in calls]
    assert type(other_mlp.decoder.layers[0]).__name__ == "TransformerLayer"  # untouched
    return messages


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
        return "accepted"
    except (ConfigError, PeerError) as error:
        return str(error)


def test_what_cannot_be_adopted_or_run_is_refused_by_name(ranks: Ranks) -> None:
    (messages,) = ranks.run(Layout(), _refusals)
    words = [
        "OtherModel can't be adopted",
        "position_embedding_type=learned_absolute",
        "recompute_granularity='full'",
        "decoder layer 3: attn_mask_type=padding",
        "decoder layer 2: mlp is a Identity",
        "micro_batch_size=2",
        "integrations.megatron.adopt",
        "data_iterator is None",
        "num_microbatches=0",
        "schedule_pg_collection has several modules",
        "virtual_pipeline_model_parallel_size",
        "the loss function returned 1 values: needs (loss, report) or (loss, tokens, report)",
        "the loss function returned a Tensor: needs (loss, report)",
        "tensor_parallel_num_weight_shards",
        "did not take its batch from its iterator",
        "data_iterator ended after 8 batches: num_microbatches=9 needs 9",
        "data_iterator is a list of dict: needs an iterator",
    ]
    for message, word in zip(messages, words, strict=True):
        assert word in message


def _refusals_of_two_ranks() -> list[str]:
    """At TP 2: iterators as Megatron's loaders have them, and process groups that aren't parallel_state's."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_longstraw
    from megatron_longstraw.integrations.megatron import adopt
    from megatron_longstraw.models import transformer_config

    model = build_host(tiny_run(Layout(tp=2)), adopted=True, per_token=False)
    rank = torch.distributed.get_rank()
    assert rank == parallel_state.get_tensor_model_parallel_rank()
    own = ProcessGroupCollection.use_mpu_process_groups()
    alone = ProcessGroupCollection()
    alone.tp = [torch.distributed.new_group([r]) for r in range(2)][rank]
    left_out = ProcessGroupCollection()
    left_out.tp = own.tp
    left_out.dp = torch.distributed.GroupMember.NON_GROUP_MEMBER
    schedule = megatron_longstraw.get_forward_backward_func(schedule_pg_collection=own)

    def broadcasts(batches: Any, chunk: Any) -> Any:  # never called
        raise AssertionError("the batch would be broadcast at another length")

    def reads(batches: Any, chunk: Any) -> Any:  # never called
        raise AssertionError("there are too few batches")

    def run(step: Any, count: int, **arguments: Any) -> None:
        batches = iter(edge_samples()) if rank == 0 else None
        schedule(forward_step_func=step, data_iterator=batches, model=model, num_microbatches=count, **arguments)

    reads.longstraw_reads_every_rank = True  # type: ignore[attr-defined]
    config = transformer_config(tiny_run(Layout(tp=2)))
    config.sequence_parallel = False  # Megatron's local norms refuse it
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    other = GPTModel(config, spec, vocab_size=256, max_sequence_length=8, position_embedding_type="rope")
    other.pg_collection = alone
    calls = [
        lambda: run(broadcasts, 8),
        lambda: run(functools.partial(reads), 9),
        lambda: run(reads, 8, pg_collection=alone),
        lambda: megatron_longstraw.get_forward_backward_func(schedule_pg_collection=alone),
        lambda: megatron_longstraw.get_forward_backward_func(schedule_pg_collection=left_out),
        lambda: adopt(other),
    ]
    return [_message(call) for call in calls]


def test_what_would_hang_two_ranks_is_refused_on_both(ranks: Ranks) -> None:
    words = [
        "forward_step.longstraw_reads_every_rank = True",
        "data_iterator ended after 8 batches: num_microbatches=9 needs 9",
        "pg_collection.tp has the ranks",
        "schedule_pg_collection.tp has the ranks",
        "schedule_pg_collection.dp has the ranks []",
        "the model's pg_collection.tp has the ranks",
    ]
    for messages in ranks.run(Layout(tp=2), _refusals_of_two_ranks):
        for message, word in zip(messages, words, strict=True):
            assert word in message


class _OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU of its rank: it has to come to the CPU before it is sent."""

    is_cpu = False  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("pickled on its device")


def _evaluated_with_shared_batches() -> list[Any]:
    """Batches of device tensors and [1, 1, S, S] masks on TP rank 0 only."""
    import megatron_longstraw

    def step(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        assert batch["attention_mask"] is None
        fields = {name: None if value is None else value.to("cpu") for name, value in batch.items()}
        return forward_step(triple_loss, iter([fields]), chunk)

    step.longstraw_reads_every_rank = True  # type: ignore[attr-defined]
    model = build_host(tiny_run(Layout(tp=2)), adopted=True, per_token=False)
    batches = [{name: value.as_subclass(_OnDevice) for name, value in batch.items()} for batch in edge_samples()]
    reports = megatron_longstraw.get_forward_backward_func(options=UNEVEN)(
        forward_step_func=step,
        data_iterator=iter(batches) if torch.distributed.get_rank() == 0 else None,
        model=model,
        num_microbatches=8,
        forward_only=True,
    )
    return [report["lm loss"].tolist() for report in reports]


def test_batches_are_shared_on_the_cpu_and_without_masks(ranks: Ranks) -> None:
    first, second = ranks.run(Layout(tp=2), _evaluated_with_shared_batches)
    assert len(first) == 8
    assert first == second


def test_a_stage_without_use_for_a_batch_need_not_take_it() -> None:
    samples = [read_sample(batch, "batch") for batch in edge_samples()]
    segment = Segment(phase=Phase.IDLE, start=0, length=1)
    item = WorkItem(group=group_samples(samples)[0], segment=segment)

    def step(batches: Any, chunk: Any) -> Any:
        return chunk.output, triple_loss

    for pre_process, post_process in ((False, False), (True, False), (False, True)):
        chunk = types.SimpleNamespace(pre_process=pre_process, post_process=post_process, output=object())
        ours = drop_in._forward_step(step, drop_in._HostLosses(8, False, torch.device("cpu")), samples[0])
        if pre_process or post_process:
            with pytest.raises(ConfigError, match="did not take its batch from its iterator"):
                ours(iter([item]), chunk)
        else:
            assert ours(iter([item]), chunk)[0] is chunk.output


def _adoption_keeps_the_model() -> dict[str, Any]:
    """Outside the schedule an adopted model computes what it did, and its checkpoint has the same names."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_longstraw.integrations.megatron import adopt
    from megatron_longstraw.models import transformer_config

    run = tiny_run(Layout())
    model = GPTModel(
        config=transformer_config(run),
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=256,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    ).to(rank_device())
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    batch = edge_samples()[0]
    arguments = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    before, names = model(*arguments).detach(), list(model.state_dict())
    adopted = adopt(adopt(model))
    return {
        "same": adopted is model,
        "equal": torch.equal(model(*arguments), before),
        "names": list(model.state_dict()) == names,
    }


def test_adoption_keeps_the_model(ranks: Ranks) -> None:
    assert ranks.run(Layout(), _adoption_keeps_the_model) == [{"same": True, "equal": True, "names": True}]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["--pp", "2"]], ids=["dp2", "pp2"])
def test_the_example_prints_the_same_with_and_without(layout: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["examples/drop_in/train.py", *layout]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = []
    for flags in ([], ["--stock"]):
        run = subprocess.run([*command, *flags], cwd=ROOT, env=environment, text=True, capture_output=True, check=True)
        lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
        printed.append([(float(words[3]), float(words[6])) for words in lines])
    assert len(printed[0]) == 3
    torch.testing.assert_close(printed[0], printed[1], rtol=0, atol=2e-5)  # of five printed digits the last may differ


def test_the_package_stays_light() -> None:
    code = "import sys, megatron_longstraw; assert not {'torch', 'megatron.core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'get_schedule'"):
        _ = __import__("megatron_longstraw").get_schedule
