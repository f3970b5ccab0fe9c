"""Log-probs and entropies of target tokens over a sharded vocabulary, a block of tokens at a time.

The logits of a response of a few thousand tokens over 248,320 words fill gigabytes in float32. Here they exist
for one block of tokens at a time; backward computes each block's logits again from the hidden states. Recomputed
blocks: Cut Your Losses (arXiv 2411.09009) and Liger's fused linear cross entropy (arXiv 2410.10989); sums over
vocabulary shards: Megatron-Core's ``tensor_parallel/cross_entropy.py``.

1. Not more than one block of logits is alive, in forward as in backward; with entropy, two tensors of its size
   (and in half precision, for a moment, the half product beside its float32 copy).
2. Backward calls no collective; forward calls two per block: one maximum, one sum.
3. What is kept for backward is the inputs and two (with entropy: three) numbers per token.
4. Without a gradient for the entropy, backward does what it does where entropy is off.

Shape suffixes: N tokens, B tokens of a block, H hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_HALVES = (torch.bfloat16, torch.float16)


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    block_tokens: int = 1024,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), the rows of weight over `group`.

    With l = logits / T, p = softmax(l), H = -sum_j p_j log p_j, the gradients g of log p_t and gH of H give
    dl_j = g (1[j = t] - p_j) - gH p_j (log p_j + H), computed per block and divided by T once.

    The gradient of `hidden` is *partial*: each rank's holds the share of its own vocabulary rows and is not summed
    over `group`. The region that brought `hidden` to the ranks sums it: the backward of Megatron's
    ``gather_from_sequence_parallel_region`` (reduce-scatter) or ``copy_to_tensor_model_parallel_region`` (all-reduce).
    The gradient of `weight` is complete. Blocks change results by rounding only.

    Args:
        hidden: [n, h], float32, float64, bfloat16 or float16; the same on all ranks of `group`. n may be 0.
        weight: [V / tp, h], dtype of `hidden`; rank r of the group holds rows r * V / tp and on.
        targets: [n] int64, ids in [0, V). They are not checked, as that would wait for the device: an id outside
            gives a number that is no log-prob.
        temperature: divides the logits, > 0.
        block_tokens: tokens whose logits exist at once.
        group: ranks that share the vocabulary, each of which makes this call with as many tokens; None: this rank
            holds all of it.
        with_entropy: also return the entropies; they then cost one more [block_tokens, V / tp] tensor.

    Returns:
        log_probs [n] and entropies [n] (nats; None without `with_entropy`), float64 where `hidden` is, else float32:
        the logits are a product in the dtype of `hidden`, all after it is in float32 (or float64).

    Raises:
        ValueError: shapes, dtypes, temperature or block_tokens can't be used.
    """
    _check_arguments(hidden, weight, targets, temperature, block_tokens)
    shard = _Shard(group, temperature)
    return _VocabParallelLogProbs.apply(hidden, targets, weight, shard, block_tokens, with_entropy)


def dense_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The naive reference of `vocab_parallel_log_probs` for one rank: all logits at once, plain autograd.

    Args:
        hidden: [n, h].
        weight: [V, h], all rows.
        targets: [n] int64.
        temperature: divides the logits.
        with_entropy: also return the entropies.

    Returns:
        log_probs [n] and entropies [n] or None, float64 where `hidden` is, else float32.

    Raises:
        ValueError: shapes, dtypes or temperature can't be used.
    """
    _check_arguments(hidden, weight, targets, temperature, 1)
    logits_NV = (hidden @ weight.t()).to(_math_dtype(hidden.dtype)) / temperature
    log_p_NV = torch.log_softmax(logits_NV, dim=1)
    log_probs_N = log_p_NV.gather(1, targets[:, None]).squeeze(1)
    return log_probs_N, -(log_p_NV.exp() * log_p_NV).sum(dim=1) if with_entropy else None


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, targets_N: Tensor, weight_VH: Tensor, shard: "_Shard", block: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, dtype = hidden_NH.shape[0], _math_dtype(hidden_NH.dtype)
        outputs = [hidden_NH.new_empty(tokens, dtype=dtype) for _ in range(4 if entropy else 3)]
        for rows in _blocks(tokens, block):
            blocks = _forward_block(shard, weight_VH, hidden_NH[rows], targets_N[rows], entropy)
            for output_N, block_B in zip(outputs, blocks, strict=True):
                output_N[rows] = block_B
        log_probs_N, max_N, log_sum_N, *entropies = outputs
        entropy_N = entropies[0] if entropy else None

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, targets_N, weight_VH, max_N, log_sum_N, entropy_N)
        ctx.shard, ctx.block = shard, block
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlog_probs_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, targets_N, weight_VH, max_N, log_sum_N, entropy_N = ctx.saved_tensors
        per_token = [targets_N, max_N, log_sum_N, torch.zeros_like(max_N) if dlog_probs_N is None else dlog_probs_N]
        if dentropy_N is not None:
            per_token += [entropy_N, dentropy_N]
        needs_dhidden, _, needs_dweight, *_ = ctx.needs_input_grad
        dhidden_NH = hidden_NH.new_empty(hidden_NH.shape) if needs_dhidden else None
        dweight_VH = torch.zeros_like(weight_VH, dtype=max_N.dtype) if needs_dweight else None
        for rows in _blocks(hidden_NH.shape[0], ctx.block):
            dlogits_BV = _backward_block(ctx.shard, weight_VH, hidden_NH[rows], *(each[rows] for each in per_token))
            if dhidden_NH is not None:
                torch.mm(dlogits_BV, weight_VH, out=dhidden_NH[rows])
            if dweight_VH is not None:
                _add_product(dweight_VH, dlogits_BV.t(), hidden_NH[rows])
            del dlogits_BV  # before the next block's logits
        return dhidden_NH, None, None if dweight_VH is None else dweight_VH.to(weight_VH.dtype), None, None, None


@dataclass(frozen=True)
class _Shard:
    """Which vocabulary rows this rank has, and what all ranks of the group do with their logits."""

    group: dist.ProcessGroup | None
    temperature: float

    def logits(self, hidden_BH: Tensor, weight_VH: Tensor) -> Tensor:
        """A fresh [B, V] tensor, in the dtype of the mathematics."""
        logits_BV = torch.mm(hidden_BH, weight_VH.t()).to(_math_dtype(hidden_BH.dtype))
        return logits_BV if self.temperature == 1 else logits_BV.div_(self.temperature)

    def locate(self, targets_B: Tensor, vocab_rows: int) -> tuple[Tensor, Tensor]:
        """A row of this rank for every target, [B, 1], and whether it is the target's own."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        targets_B = targets_B - rank * vocab_rows
        local_B = targets_B.clamp(0, vocab_rows - 1)
        return local_B[:, None], (local_B == targets_B)[:, None]

    def all_reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=op, group=self.group)
        return values


def _forward_block(
    shard: _Shard, weight_VH: Tensor, hidden_BH: Tensor, targets_B: Tensor, with_entropy: bool
) -> list[Tensor]:
    """[B] each: log-probs, maximum of the logits l, log of the sum of e^(l - maximum), and entropies if asked for.

    Backward gets the two parts of the lse, not their sum: that would round where logits are large.
    """
    x_BV = shard.logits(hidden_BH, weight_VH)
    max_B = shard.all_reduce(x_BV.amax(dim=1), dist.ReduceOp.MAX)
    x_BV.sub_(max_B[:, None])
    sums = x_BV.new_empty(3 if with_entropy else 2, x_BV.shape[0])  # of e^x, of x at the target, of x e^x
    local_B1, ours_B1 = shard.locate(targets_B, x_BV.shape[1])
    sums[1] = x_BV.gather(1, local_B1).where(ours_B1, 0).squeeze(1)
    if with_entropy:
        exp_BV = x_BV.exp()
        sums[0] = exp_BV.sum(dim=1)
        sums[2] = x_BV.mul_(exp_BV).sum(dim=1)
    else:
        sums[0] = x_BV.exp_().sum(dim=1)
    sum_B, target_B, *weighted = shard.all_reduce(sums, dist.ReduceOp.SUM)
    log_sum_B = sum_B.log()
    return [target_B - log_sum_B, max_B, log_sum_B, *(log_sum_B - weighted_B / sum_B for weighted_B in weighted)]


def _backward_block(
    shard: _Shard,
    weight_VH: Tensor,
    hidden_BH: Tensor,
    targets_B: Tensor,
    max_B: Tensor,
    log_sum_B: Tensor,
    dlog_probs_B: Tensor,
    entropy_B: Tensor | None = None,
    dentropy_B: Tensor | None = None,
) -> Tensor:
    """Gradient of hidden @ weight.T, [B, V], in its dtype."""
    log_p_BV = shard.logits(hidden_BH, weight_VH).sub_(max_B[:, None]).sub_(log_sum_B[:, None])
    g_B1 = (dlog_probs_B / shard.temperature)[:, None]
    if entropy_B is None or dentropy_B is None:
        dlogits_BV = log_p_BV.exp_().mul_(-g_B1)
    else:
        p_BV = log_p_BV.exp()
        gH_B1 = (dentropy_B / shard.temperature)[:, None]
        dlogits_BV = log_p_BV.add_(entropy_B[:, None]).mul_(-gH_B1).sub_(g_B1).mul_(p_BV)
    local_B1, ours_B1 = shard.locate(targets_B, weight_VH.shape[0])
    return dlogits_BV.scatter_add_(1, local_B1, g_B1.where(ours_B1, 0)).to(hidden_BH.dtype)


def _blocks(tokens: int, block_tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, block_tokens):
        yield slice(start, min(start + block_tokens, tokens))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding the product to a half dtype of the factors."""
    if left.is_cuda and left.dtype in _HALVES:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))  # the CPU has no such product
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_arguments(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, block_tokens: int) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise ValueError(f"needs hidden [n, h] and weight [V / tp, h], at least one row: got {shapes}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"needs targets [n] int64 for hidden [n, h]: got {shapes}, targets of {targets.dtype}")
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.float64, *_HALVES):
        raise ValueError(
            f"needs hidden and weight of one dtype, float32, float64, bfloat16 or float16: "
            f"got {hidden.dtype} and {weight.dtype}; cast one of them"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: needs a number > 0 (greedy samples have no log-probs)")
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}: needs an integer >= 1")
