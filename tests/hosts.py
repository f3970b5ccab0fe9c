"""A host as an ordinary user of Megatron-Core writes it: batches, a forward step, losses, a model, a training step.

Nothing here knows of megatron_longstraw but `build_host`, which has the model adopted (or built) for it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_longstraw.config import RunConfig

LENGTH = 64
"""Tokens of each sample; the host pads them all alike."""


def sample(prompt: Sequence[int], response: Sequence[int], mask: Sequence[float] | None = None) -> dict[str, Tensor]:
    """A batch of one sequence, with labels and masks shifted as Megatron's datasets have them."""
    ids = [*prompt, *response]
    mask = [0.0] * len(prompt) + ([1.0] * len(response) if mask is None else [float(m) for m in mask])
    padding = LENGTH + 1 - len(ids)
    tokens, mask = torch.tensor(ids + [0] * padding), torch.tensor(mask + [0.0] * padding)
    return {
        "tokens": tokens[None, :-1],
        "labels": tokens[None, 1:],
        "loss_mask": mask[None, 1:],
        "attention_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None],
        "position_ids": torch.arange(LENGTH)[None],
        "weights": torch.linspace(-1, 2, LENGTH, dtype=torch.float64)[None],
        "reward": torch.tensor([0.5]),
    }


def edge_samples(seed: int = 0) -> list[dict[str, Tensor]]:
    """Samples of one prompt apart from each other, masks with holes, a prompt of a token, and nothing to train."""
    g = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return g.integers(1, 256, n).tolist()

    long, short = ids(37 + seed), ids(9)
    return [
        sample(long, ids(5)),
        sample(short, ids(3), [1, 0, 0]),
        sample(long, ids(6), [1, 1, 0, 0, 1, 1]),
        sample(long, ids(9), [0] * 9),  # nothing to train
        sample([7], ids(4)),
        sample(long, ids(1)),
        sample(short, ids(LENGTH - 8)),  # no padding
        sample(short, ids(8), [0, 0, 1, 0, 0, 1, 0, 0]),  # its prompt ends later than the others'
    ][: 8 - seed]


def get_batch(data_iterator: Iterator[dict[str, Tensor]]) -> tuple[Tensor, ...]:
    batch = next(data_iterator)
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "weights")
    return tuple(batch[name] for name in names)


def triple_loss(loss_mask: Tensor, weights: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As in Megatron's pretrain_gpt.py: (loss, tokens, report)."""
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask * weights.view(-1))
    num_tokens = mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def pair_loss(loss_mask: Tensor, weights: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The older form: (mean over tokens, report)."""
    loss, num_tokens, _ = triple_loss(loss_mask, weights, output_tensor)
    loss = loss / num_tokens.clamp(min=1)
    return loss, {"lm loss": loss.clone().detach()}


def forward_step(loss_func: Any, data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    tokens, labels, loss_mask, attention_mask, position_ids, weights = get_batch(data_iterator)
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
    return output_tensor, functools.partial(loss_func, loss_mask, weights)


def logits_forward_step(loss_func: Any, data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Without labels for the model: the loss function has the logits [1, T, V]."""
    tokens, labels, loss_mask, attention_mask, position_ids, weights = get_batch(data_iterator)

    def loss_of_logits(logits: Tensor) -> Any:
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return loss_func(loss_mask, weights, losses)

    return model(tokens, position_ids, attention_mask), loss_of_logits


def build_host(run: RunConfig, *, adopted: bool, per_token: bool) -> list[Any]:
    """Model chunks in Megatron's DistributedDataParallel, from Megatron's local spec (adopted), or built by us."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_longstraw.integrations.megatron import adopt
    from megatron_longstraw.models import build_model, transformer_config
    from megatron_longstraw.models.parameters import initialize_weights

    if adopted:
        config = transformer_config(run)
        config.sequence_parallel = False  # Megatron's local norms refuse it
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        chunks = [
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=run.model.vocab_size,
                max_sequence_length=LENGTH,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=run.model.tie_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            ).to(config.params_dtype)  # Megatron's local norms are float32
            for stage in (range(run.parallel.vpp) if run.parallel.vpp else [None])
        ]
        initialize_weights(chunks, run.seed)
        adopt(chunks)
    else:
        chunks = build_model(run)
        config = chunks[0].config
    config.variable_seq_lengths, config.calculate_per_token_loss = False, per_token
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = lambda loss: loss * 4
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
