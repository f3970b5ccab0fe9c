"""A Megatron-Core training loop as its users write it; two lines, marked "longstraw", make it share equal prompts.

torchrun --nproc-per-node 2 examples/drop_in/train.py            # on the CPU, or one GPU a rank
torchrun --nproc-per-node 2 examples/drop_in/train.py --stock    # without the two lines: the same losses
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from megatron_longstraw import distributed
from megatron_longstraw.config import ParallelConfig, ScheduleConfig

distributed.quiet()
DEVICE = distributed.start()

import torch  # noqa: E402
from megatron.core import parallel_state, pipeline_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch import Tensor  # noqa: E402

import megatron_longstraw  # noqa: E402
from megatron_longstraw.integrations.megatron import adopt  # noqa: E402

LENGTH, PROMPT, SAMPLES, VOCABULARY = 512, 480, 8, 256


def batches() -> Iterator[dict[str, Tensor]]:
    """Responses to one prompt, a sequence a micro-batch, with labels and masks shifted as Megatron's datasets do."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=generator)
    while True:
        tokens = torch.cat([prompt, torch.randint(VOCABULARY, (LENGTH + 1 - PROMPT,), generator=generator)])[None]
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(LENGTH)[None]}
        batch["loss_mask"] = (batch["position_ids"] >= PROMPT - 1).float()
        yield {name: field.to(DEVICE) for name, field in batch.items()}


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (output_tensor.view(-1).float() * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum().int()
    return loss, num_tokens, {"loss": loss.detach() / num_tokens.clamp(min=1)}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(loss_func, batch["loss_mask"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args()
    distributed.initialize_model_parallel(ParallelConfig(pp=args.pp))
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(DEVICE)
    schedule = pipeline_parallel.get_forward_backward_func()
    if not args.stock:
        adopt(model)  # longstraw
        schedule = megatron_longstraw.get_forward_backward_func(options=ScheduleConfig(prompt_chunk_tokens=128))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [model], use_gloo_process_groups=False)
    data_iterator = batches()
    for step in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=SAMPLES,
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        _, grad_norm, _ = optimizer.step()
        if reports and parallel_state.get_data_parallel_rank() == 0:
            loss = sum(report["loss"].item() for report in reports) / len(reports)
            print(f"step {step}  loss {loss:.5f}  gradient norm {grad_norm:.5f}", flush=True)


main()
