"""What patches/core_v0.19.0/checkout.patch calls: Megatron's own RL loop (train_rl.py) on the schedule.

train_rl.py takes log-probs from the logits of whole sequences, whose masks and log-probs belong to the token that is
*predicted*. Here both are shifted to the position that predicts it, as in the rest of Megatron, so that samples can be
cut anywhere, and the model is asked for the loss of labels: vocabulary-parallel, and without a head for prompt tokens.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F


def rl_batches(loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
    """train_rl.py's batches as mappings that `megatron_longstraw.samples` takes.

    Args:
        loader: yields (tokens [1, S], advantages [1], old log-probs [1, S - 1], loss mask [1, S], position ids [1, S],
            reference log-probs [1, S - 1], log-probs of the inference engine [1, S - 1]).
    """
    for tokens, advantages, old, mask, position_ids, ref, inference in loader:
        yield {
            "tokens": tokens,
            "labels": F.pad(tokens[:, 1:], (0, 1)),
            "loss_mask": F.pad(mask[:, 1:], (0, 1)),
            "position_ids": position_ids,
            "advantages": advantages,
            "old_logprobs": F.pad(old, (0, 1)),
            "ref_logprobs": F.pad(ref, (0, 1)),
            "inference_logprobs": F.pad(inference, (0, 1)),
        }


def rl_forward_step(
    batch: Mapping[str, Tensor],
    model: Any,
    args: Namespace,
    grpo_loss: Callable[..., tuple[Tensor, ...]],
    loss_func: Callable[..., Any],
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """In place of the rest of train_rl.py's `forward_step`.

    Args:
        batch: of `rl_batches`, or cut from one.
        model: the model.
        args: Megatron's.
        grpo_loss: `calculate_grpo_loss` of megatron/rl/rl_utils.py.
        loss_func: train_rl.py's.
    """
    from megatron.core.utils import get_attr_wrapped_model

    batch = {name: value.cuda() for name, value in batch.items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    if not get_attr_wrapped_model(model, "post_process"):
        return output, functools.partial(loss_func, *[None] * 6)
    old = batch["old_logprobs"]
    loss, *terms = grpo_loss(
        current_logprobs=(-output).to(old.dtype),  # rounded as the old ones were: equal policies have the ratio 1
        old_logprobs=old,
        ref_logprobs=batch["ref_logprobs"],
        advantages=batch["advantages"],
        clamp_eps_lower=args.grpo_clamp_eps_lower,
        clamp_eps_upper=args.grpo_clamp_eps_upper,
        kl_beta=args.grpo_kl_beta,
        entropy_weight=args.grpo_entropy_term_weight,
        inference_logprobs=batch["inference_logprobs"] if args.rl_inference_logprobs_is_correction else None,
        is_truncation_coef=args.rl_importance_sampling_truncation_coef,
    )
    return loss, functools.partial(loss_func, batch["loss_mask"], *terms)
