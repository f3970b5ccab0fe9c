"""The GRPO objective as pure functions: advantages, token weights, and one response's share of the loss.

1. Every normaliser is counted over the whole global batch before any forward (`prepare_batch`), so a share needs
   nothing of the other responses, and the sum of shares does not depend on how the batch is split over
   micro-batches and ranks.
2. Shares are summed, never averaged: no division by micro-batches or ranks may follow.
3. A token that is not trained reaches neither the loss nor a gradient, whatever its log-prob is. A response
   without trained tokens has a loss of 0 and a gradient of 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_longstraw.config import ObjectiveConfig
from megatron_longstraw.rollouts import Response, RolloutError, RolloutGroup

__all__ = ["TokenTargets", "group_advantages", "policy_loss", "prepare_batch", "token_weights"]

_ADVANTAGE_EPSILON = 1e-6
_COUNT_EPSILON = 1e-8
_LOG_RATIO_BOUND = 20.0
_KL_BOUND = 10.0


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTargets:
    """What the loss needs of one response of n tokens, besides the log-probs of the policy."""

    weights: np.ndarray
    """float64 [n]: the loss of the batch is the sum of weight * token loss; 0 where the token is not trained."""
    advantages: np.ndarray
    """float64 [n]."""
    old_log_probs: np.ndarray | None = None
    """float64 [n], by the policy before the step; None: the step is on-policy, and the ratio is 1."""
    ref_log_probs: np.ndarray | None = None
    """float64 [n], by the reference model."""

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if values is not None and (values.dtype != np.float64 or values.shape != (len(self.weights),)):
                raise ValueError(
                    f"{name}: needs float64 [n] with n = {len(self.weights)}, the number of weights: "
                    f"got {values.dtype} {list(values.shape)}"
                )


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), the outcome advantage of GRPO (arXiv 2402.03300, section 4.1.2).

    As in verl (``compute_grpo_outcome_advantage``), std has ddof=1, and a group of one has mean 0 and std 1. Equal
    rewards give exactly 0; verl leaves the rounding error of the mean, times 1e6.

    Args:
        rewards: [G], one per response of a group.

    Returns:
        float64 [G].

    Raises:
        ValueError: rewards is not one-dimensional, or not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards: needs one finite number per response, [G], got {rewards!r}")
    if len(rewards) == 1:
        return rewards / (1 + _ADVANTAGE_EPSILON)
    if (rewards == rewards[:1]).all():
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + _ADVANTAGE_EPSILON)


def token_weights(groups: Sequence[RolloutGroup], config: ObjectiveConfig) -> list[list[np.ndarray]]:
    """Weight of every token's loss in the loss of the batch; `groups` must be the whole global batch.

    With m the mask of a response (emptied for truncated ones under ``mask_truncated``), |m| its trained tokens, N
    those of the batch, and B the responses with |m| > 0 (verl's ``seq_mask``: a response without trained tokens is
    not counted), as in verl's ``agg_loss``:

    - "token-mean": m / N (DAPO, arXiv 2503.14476, equation 8)
    - "seq-mean-token-sum": m / B
    - "seq-mean-token-mean": m / (|m| + 1e-8) / B (GRPO, arXiv 2402.03300, equation 3)

    Args:
        groups: all groups of the step, over all data-parallel ranks.
        config: ``loss_agg_mode`` and ``mask_truncated`` are read.

    Returns:
        For every group, for every response, float64 [n]; all 0 in a batch without trained tokens.
    """
    masks = [[_trained(response, config) for response in group.responses] for group in groups]
    counts = [np.count_nonzero(mask) for group in masks for mask in group]
    tokens, responses = max(sum(counts), 1), max(sum(count > 0 for count in counts), 1)

    def weigh(mask: np.ndarray) -> np.ndarray:
        match config.loss_agg_mode:
            case "token-mean":
                return mask / tokens
            case "seq-mean-token-sum":
                return mask / responses
            case "seq-mean-token-mean":
                return mask / (np.count_nonzero(mask) + _COUNT_EPSILON) / responses

    return [[weigh(mask) for mask in group] for group in masks]


def prepare_batch(groups: Sequence[RolloutGroup], config: ObjectiveConfig) -> list[list[TokenTargets]]:
    """All that the loss needs of the whole global batch; a rank then uses the targets of its own responses.

    Advantages that the rollout file gives win, response by response, over those computed from the rewards of all
    responses of the group (truncated ones too).

    Args:
        groups: all groups of the step, over all data-parallel ranks.
        config: the objective.

    Returns:
        The targets of every response of every group, in their order.

    Raises:
        RolloutError: kl_coef > 0 and a response of one token or more has no ref_log_probs; names the group's source.
    """
    batch = []
    for group, weights in zip(groups, token_weights(groups, config), strict=True):
        advantages = group_advantages(np.array([response.reward for response in group.responses]))
        targets = []
        for index, response in enumerate(group.responses):
            if config.kl_coef > 0 and response.ref_log_probs is None and len(response.ids):
                raise RolloutError(
                    f"{group.source}: group {group.group_id!r}, response {index}: ref_logprobs missing, needs one per "
                    f"token, as objective.kl_coef={config.kl_coef}; add them, or set objective.kl_coef to 0"
                )
            own = response.advantages
            targets.append(
                TokenTargets(
                    weights=weights[index],
                    advantages=np.full(len(response.ids), advantages[index]) if own is None else own,
                    old_log_probs=response.old_log_probs,
                    ref_log_probs=response.ref_log_probs,
                )
            )
        batch.append(targets)
    return batch


def policy_loss(
    log_probs: Tensor, targets: TokenTargets, config: ObjectiveConfig, entropy: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One response's share of the objective.

    Per trained token, with r = exp(log_prob - old_log_prob), the log-ratio clamped to +-20, and A the advantage:

    - PPO's clip (arXiv 1707.06347, equation 7; two bounds: 2503.14476, equation 8):
      max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
    - dual clip (arXiv 1912.09729, equation 5), where A < 0: at most -A clip_ratio_c
    - + kl_coef * k3, d = ref_log_prob - log_prob clamped to +-20, k3 = e^d - d - 1, at most 10
      (arXiv 2402.03300, equation 4; http://joschu.net/blog/kl-approx.html)
    - - entropy_coef * entropy

    The share is the sum of weight * that. All bounds are verl's (``compute_policy_loss_vanilla``, ``kl_penalty``).

    Args:
        log_probs: [n] of the policy, float32 or float64, which is also the dtype of all that is computed.
        targets: of the same response.
        config: the objective that `targets` was prepared for.
        entropy: [n] of the policy at each token, nats, dtype of `log_probs`; needed if entropy_coef > 0.

    Returns:
        The share, a scalar with a gradient path to `log_probs` (and `entropy`) also if nothing is trained; and
        detached scalars, each a sum over tokens, weighted like the loss. Added over all responses of the batch and
        divided by the added "weight" they are weighted means over its trained tokens:

        - "loss": the share
        - "weight": the tokens' weights
        - "clip_fraction": tokens whose gradient a clip took away (the range's, or the dual clip)
        - "kl": k3 in nats, without kl_coef; only if there are ref_log_probs
        - "entropy": nats, without entropy_coef; only if `entropy` is given

    Raises:
        ValueError: shapes or dtypes don't fit, or the config asks for an entropy or reference that is not given.
    """
    _check_arguments(log_probs, targets, config, entropy)
    # positions, not a mask on the device: that would be counted there, and waited for
    rows = np.flatnonzero(targets.weights)
    trained = torch.from_numpy(rows).to(log_probs.device, non_blocking=True)

    def constant(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(log_probs, non_blocking=True)

    log_probs = log_probs[trained]
    weights, advantages = constant(targets.weights), constant(targets.advantages)
    old = log_probs.detach() if targets.old_log_probs is None else constant(targets.old_log_probs)
    losses, clipped = _clipped_losses(log_probs - old, advantages, config)
    loss = (weights * losses).sum()
    metrics = {"weight": weights.sum(), "clip_fraction": (weights * clipped).sum()}
    if targets.ref_log_probs is not None:
        kl = (weights * _k3(log_probs, constant(targets.ref_log_probs))).sum()
        metrics["kl"] = kl.detach()
        if config.kl_coef > 0:
            loss = loss + config.kl_coef * kl
    if entropy is not None:
        bonus = (weights * entropy[trained]).sum()
        metrics["entropy"] = bonus.detach()
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * bonus
    return loss, {"loss": loss.detach(), **metrics}


def _clipped_losses(log_ratio: Tensor, advantages: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Token losses, and which of them a clip made constant."""
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    clipped = bounded > free  # on the bound itself the gradient passes
    losses = torch.where(clipped, bounded, free)
    if config.clip_ratio_c is not None:
        cap = -advantages * config.clip_ratio_c
        capped = (advantages < 0) & (losses > cap)
        losses = torch.where(capped, cap, losses)
        clipped = clipped | capped
    return losses, clipped


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    d = (ref_log_probs - log_probs).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (d.expm1() - d).clamp(max=_KL_BOUND)  # e^d - 1 loses all digits where the policies are close


def _trained(response: Response, config: ObjectiveConfig) -> np.ndarray:
    """bool [n]."""
    return np.zeros_like(response.mask) if config.mask_truncated and response.truncated else response.mask


def _check_arguments(log_probs: Tensor, targets: TokenTargets, config: ObjectiveConfig, entropy: Tensor | None) -> None:
    n = len(targets.weights)
    for name, values in (("log_probs", log_probs), ("entropy", entropy)):
        if values is not None and (values.shape != (n,) or values.dtype not in (torch.float32, torch.float64)):
            raise ValueError(
                f"{name}: needs float32 or float64 [n] with n = {n}, the response's tokens: "
                f"got {values.dtype} {list(values.shape)}"
            )
    if entropy is None and config.entropy_coef > 0:
        raise ValueError(f"entropy is missing, objective.entropy_coef={config.entropy_coef} needs it")
    if targets.ref_log_probs is None and config.kl_coef > 0 and n:
        raise ValueError(
            f"targets.ref_log_probs is missing, objective.kl_coef={config.kl_coef} needs it: "
            f"prepare the targets with the same config"
        )
