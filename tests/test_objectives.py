"""The objective against an oracle written per token in plain Python, and the faults that other trainers had."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_longstraw.config import ObjectiveConfig
from megatron_longstraw.objectives import TokenTargets, group_advantages, policy_loss, prepare_batch, token_weights
from megatron_longstraw.rollouts import Response, RolloutError, RolloutGroup

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
FULL = ObjectiveConfig(clip_ratio_high=0.28, kl_coef=0.1, entropy_coef=0.05)


@pytest.fixture(autouse=True)
def nan_in_uninitialised_buffers() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def a_response(mask: Sequence[int], reward: float = 0.0, **fields: Any) -> Response:
    return Response(ids=np.arange(len(mask)), mask=np.array(mask, dtype=bool), reward=reward, **fields)


def a_group(*responses: Response, name: str = "g") -> RolloutGroup:
    return RolloutGroup(
        group_id=name,
        prompt_ids=np.arange(3),
        responses=responses,
        temperature=1.0,
        meta=None,
        source=f"file.jsonl:{name}",
    )


def a_batch(seed: int = 0) -> tuple[list[RolloutGroup], list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Groups of 4, 1 and 2 responses, with their log-probs and entropies; every odd shape is there once."""
    rng = np.random.default_rng(seed)

    def response(mask: Sequence[int], **fields: Any) -> Response:
        n = len(mask)
        old, ref = -rng.exponential(2, (2, n))
        return a_response(mask, **{"reward": rng.normal(), "old_log_probs": old, "ref_log_probs": ref, **fields})

    groups = [
        a_group(
            response([1, 1, 0, 0, 1, 1]),
            response([1, 0, 0]),  # only the first token
            response([]),
            response([0, 0, 0, 0]),
            name="odd",
        ),
        a_group(response([1] * 9), name="alone"),
        a_group(
            response([1] * 5, old_log_probs=None, truncated=True),
            response([0, 1, 1], advantages=rng.normal(size=3)),
            name="pair",
        ),
    ]
    log_probs = [[-rng.exponential(2, len(r.ids)) for r in g.responses] for g in groups]
    entropies = [[rng.exponential(2, len(r.ids)) for r in g.responses] for g in groups]
    return groups, log_probs, entropies


def oracle(
    groups: Sequence[RolloutGroup],
    log_probs: Sequence[Sequence[np.ndarray]],
    entropies: Sequence[Sequence[np.ndarray]],
    config: ObjectiveConfig,
    base: Sequence[Sequence[np.ndarray]] | None = None,
) -> float:
    """The loss of a whole batch, token by token; `base` are the log-probs taken as old where a response has none."""
    base = log_probs if base is None else base
    per_response = []
    for g, group in enumerate(groups):
        rewards = [r.reward for r in group.responses]
        mean = sum(rewards) / len(rewards) if len(rewards) > 1 else 0.0
        std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 1.0
        for i, r in enumerate(group.responses):
            losses = []
            for t in range(len(r.ids)):
                if not r.mask[t] or (config.mask_truncated and r.truncated):
                    continue
                advantage = (r.reward - mean) / (std + 1e-6) if r.advantages is None else r.advantages[t]
                old = base[g][i][t] if r.old_log_probs is None else r.old_log_probs[t]
                ratio = math.exp(min(max(log_probs[g][i][t] - old, -20), 20))
                loss = max(
                    -advantage * ratio,
                    -advantage * min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high),
                )
                if advantage < 0 and config.clip_ratio_c is not None:
                    loss = min(loss, -config.clip_ratio_c * advantage)
                if config.kl_coef:
                    d = min(max(r.ref_log_probs[t] - log_probs[g][i][t], -20), 20)
                    loss += config.kl_coef * min(max(math.exp(d) - d - 1, -10), 10)
                losses.append(loss - config.entropy_coef * entropies[g][i][t])
            per_response.append(losses)
    trained = [losses for losses in per_response if losses]
    if not trained:
        return 0.0
    if config.loss_agg_mode == "token-mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if config.loss_agg_mode == "seq-mean-token-sum":
        return sum(map(sum, trained)) / len(trained)
    return sum(sum(losses) / (len(losses) + 1e-8) for losses in trained) / len(trained)


def shares(
    groups: Sequence[RolloutGroup],
    log_probs: Sequence[Sequence[np.ndarray]],
    entropies: Sequence[Sequence[np.ndarray]],
    config: ObjectiveConfig,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[Tensor]]:
    """Share, metrics and log-prob gradient of every response, flat over the groups."""
    losses, metrics, gradients = [], [], []
    for g, batch in enumerate(prepare_batch(groups, config)):
        for i, targets in enumerate(batch):
            leaf = torch.tensor(log_probs[g][i], dtype=dtype, requires_grad=True)
            loss, sums = policy_loss(leaf, targets, config, torch.tensor(entropies[g][i], dtype=dtype))
            loss.backward()
            assert leaf.grad is not None
            losses.append(loss.detach())
            metrics.append(sums)
            gradients.append(leaf.grad)
    return losses, metrics, gradients


CONFIGS = {
    "grpo": ObjectiveConfig(),
    "no-dual-clip": ObjectiveConfig(clip_ratio_c=None),
    "dapo": ObjectiveConfig(clip_ratio_high=0.28, clip_ratio_c=10.0),
    "kl-entropy": FULL,
    "mask-truncated": replace(FULL, mask_truncated=True),
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_oracle(seed: int, name: str, aggregation: str) -> None:
    config = replace(CONFIGS[name], loss_agg_mode=aggregation)
    groups, log_probs, entropies = a_batch(seed)
    losses, metrics, gradients = shares(groups, log_probs, entropies, config)
    want = oracle(groups, log_probs, entropies, config)
    assert sum(losses).item() == pytest.approx(want, rel=1e-13)
    assert sum(m["loss"] for m in metrics).item() == pytest.approx(want, rel=1e-13)
    flat = iter(gradients)
    step = 1e-6
    for g, group in enumerate(groups):
        for i, response in enumerate(group.responses):
            gradient = next(flat)
            for t in range(len(response.ids)):
                moved = []
                for sign in (1, -1):
                    changed = [[x.copy() for x in row] for row in log_probs]
                    changed[g][i][t] += sign * step
                    moved.append(oracle(groups, changed, entropies, config, base=log_probs))
                assert gradient[t].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_the_batch_has_tokens_in_every_branch() -> None:
    """That the test above tests something: ratios in the range, beyond both bounds, beyond the dual clip."""
    seen = set()
    for seed in (0, 1):
        groups, log_probs, _ = a_batch(seed)
        for batch, rows in zip(prepare_batch(groups, FULL), log_probs, strict=True):
            for targets, row in zip(batch, rows, strict=True):
                old = row if targets.old_log_probs is None else targets.old_log_probs
                for t in np.flatnonzero(targets.weights):
                    ratio, negative = math.exp(row[t] - old[t]), targets.advantages[t] < 0
                    place = "in" if 0.8 <= ratio <= 1.28 else "low" if ratio < 0.8 else "high" if ratio < 3 else "dual"
                    seen.add((place, bool(negative)))
    assert seen == {(place, negative) for place in ("in", "low", "high", "dual") for negative in (True, False)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_float32_is_close_to_float64(aggregation: str) -> None:
    config = replace(FULL, loss_agg_mode=aggregation)
    losses, metrics, gradients = shares(*a_batch(), config, dtype=torch.float32)
    wide, _, wide_gradients = shares(*a_batch(), config)
    assert all(x.dtype == torch.float32 for x in (*losses, *gradients, *metrics[0].values()))
    torch.testing.assert_close(torch.stack(losses).double(), torch.stack(wide), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(gradients).double(), torch.cat(wide_gradients), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", range(5))
def test_any_split_over_ranks_gives_the_same_sum(split: int, aggregation: str) -> None:
    config = replace(FULL, loss_agg_mode=aggregation)
    losses, metrics, _ = shares(*a_batch(), config)
    rng = np.random.default_rng(split)
    owner = rng.integers(0, 3, len(losses))
    per_rank = [sum(losses[i].item() for i in rng.permutation(np.flatnonzero(owner == rank))) for rank in range(3)]
    assert sum(per_rank) == pytest.approx(oracle(*a_batch(), config), rel=1e-13)
    for name in ("clip_fraction", "kl", "entropy"):
        assert math.isfinite(sum(m[name].item() for m in metrics))


def test_global_token_mean_is_not_the_mean_of_local_means() -> None:
    """Megatron-LM#4590."""
    short, long = a_response([1], advantages=np.array([-1.0])), a_response([1] * 9, advantages=np.full(9, -3.0))
    groups = [a_group(short, name="a"), a_group(long, name="b")]
    log_probs = [[np.zeros(1)], [np.zeros(9)]]
    losses, *_ = shares(groups, log_probs, log_probs, ObjectiveConfig())
    assert sum(losses).item() == pytest.approx((1 * 1 + 9 * 3) / 10)
    local = [shares([groups[i]], [log_probs[i]], [log_probs[i]], ObjectiveConfig())[0][0] for i in range(2)]
    assert (sum(local) / 2).item() == pytest.approx((1 + 3) / 2)


@pytest.mark.parametrize(
    "aggregation, want",
    [
        ("token-mean", [[1 / 5, 1 / 5, 0, 0, 1 / 5, 1 / 5], [1 / 5, 0, 0], [], [0, 0]]),
        ("seq-mean-token-sum", [[1 / 2, 1 / 2, 0, 0, 1 / 2, 1 / 2], [1 / 2, 0, 0], [], [0, 0]]),
        ("seq-mean-token-mean", [[1 / 8, 1 / 8, 0, 0, 1 / 8, 1 / 8], [1 / 2, 0, 0], [], [0, 0]]),
    ],
)
def test_weights(aggregation: Any, want: list[list[float]]) -> None:
    """A mask with a hole, the first token only, no tokens, no trained tokens: the last two count nowhere."""
    group = a_group(a_response([1, 1, 0, 0, 1, 1]), a_response([1, 0, 0]), a_response([]), a_response([0, 0]))
    (weights,) = token_weights([group], ObjectiveConfig(loss_agg_mode=aggregation))
    assert all(w.dtype == np.float64 for w in weights)
    for got, expected in zip(weights, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-7)


@pytest.mark.parametrize("mask_truncated, want", [(False, 1 / 4), (True, 1 / 2)])
def test_truncated_responses_are_masked_before_counting(mask_truncated: bool, want: float) -> None:
    group = a_group(a_response([1, 1], reward=1.0), a_response([1, 1], reward=0.0, truncated=True))
    config = ObjectiveConfig(mask_truncated=mask_truncated)
    whole, cut = prepare_batch([group], config)[0]
    assert whole.weights.tolist() == [want, want]
    assert cut.weights.tolist() == ([0, 0] if mask_truncated else [want, want])
    assert whole.advantages[0] == pytest.approx(0.5**0.5, rel=1e-5), "the truncated one keeps its reward"
    assert group.responses[1].mask.all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_batch_without_trained_tokens(aggregation: str) -> None:
    """unsloth-zoo#1286, Relax#285: no NaN, and a gradient path, so that backward still runs on every rank."""
    groups = [a_group(a_response([0, 0, 0]), a_response([]))]
    log_probs = [[np.array([-math.inf, math.nan, -1e4]), np.zeros(0)]]
    config = replace(FULL, kl_coef=0.0, loss_agg_mode=aggregation)
    losses, metrics, gradients = shares(groups, log_probs, log_probs, config)
    assert [x.item() for x in losses] == [0, 0]
    assert [x.tolist() for x in gradients] == [[0, 0, 0], []]
    assert all(value.item() == 0 for sums in metrics for value in sums.values())


def test_untrained_tokens_reach_neither_loss_nor_gradient() -> None:
    bad = np.array([math.nan, 0.0, math.inf, -1e30])
    response = a_response([0, 1, 0, 0], old_log_probs=bad, ref_log_probs=bad, advantages=bad + 1)
    clean = a_response(
        [0, 1, 0, 0], old_log_probs=np.zeros(4), ref_log_probs=np.zeros(4), advantages=np.array([0.0, 1, 0, 0])
    )
    log_probs = np.array([-math.inf, -0.1, math.nan, 1e30])
    zeros = np.where(np.isfinite(log_probs) & (log_probs < 1), log_probs, 0)
    got = shares([a_group(response)], [[log_probs]], [[bad]], FULL)
    want = shares([a_group(clean)], [[zeros]], [[np.zeros(4)]], FULL)
    assert got[0] == want[0] and got[1] == want[1]
    assert torch.equal(got[2][0], want[2][0]) and got[2][0][1] != 0


def test_zero_advantage_group_has_no_loss() -> None:
    """cua-lite#18; 0.1 three times has a mean that isn't 0.1."""
    assert sum([0.1] * 3) / 3 != 0.1
    groups = [a_group(*(a_response([1, 1], reward=0.1) for _ in range(3)))]
    log_probs = [[np.array([-1.0, -2.0])] * 3]
    losses, _, gradients = shares(groups, log_probs, log_probs, ObjectiveConfig())
    assert all(x.item() == 0 for x in losses)
    assert all(x.tolist() == [0, 0] for x in gradients)


@pytest.mark.parametrize(
    "rewards, want",
    [
        ([], []),
        ([3.0], [3.0 / (1 + 1e-6)]),
        ([0.0, 1.0], [-0.5 / (0.5**0.5 + 1e-6), 0.5 / (0.5**0.5 + 1e-6)]),
        ([1.0, 2.0, 6.0], [-2 / (7**0.5 + 1e-6), -1 / (7**0.5 + 1e-6), 3 / (7**0.5 + 1e-6)]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
    ],
    ids=["none", "one", "two", "three", "equal"],
)
def test_group_advantages(rewards: list[float], want: list[float]) -> None:
    got = group_advantages(np.array(rewards))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("rewards", [np.zeros((2, 2)), np.array([1.0, math.nan])], ids=["2d", "nan"])
def test_group_advantages_refuses(rewards: np.ndarray) -> None:
    with pytest.raises(ValueError, match="rewards: needs one finite number"):
        group_advantages(rewards)


def one_token(log_ratio: float, advantage: float, config: ObjectiveConfig) -> tuple[float, float, float]:
    """Loss, gradient and clip fraction of one token."""
    response = a_response([1], old_log_probs=np.array([-1.0]), advantages=np.array([advantage]))
    leaf = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss(leaf, prepare_batch([a_group(response)], config)[0][0], config)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.item(), metrics["clip_fraction"].item()


@pytest.mark.parametrize(
    "ratio, advantage, loss, passes",
    [
        (0.75, 1.0, -0.75, True),
        (1.25, 1.0, -1.25, True),
        (1.26, 1.0, -1.25, False),
        (1.24, -1.0, 1.24, True),
        (1.5, -1.0, 1.5, True),
        (0.51, -1.0, 0.51, True),
        (0.49, -1.0, 0.5, False),
        (3.9, -2.0, 7.8, True),
        (4.1, -2.0, 8.0, False),  # the dual clip
        (4.1, 2.0, -2.5, False),
    ],
)
def test_clips(ratio: float, advantage: float, loss: float, passes: bool) -> None:
    config = ObjectiveConfig(clip_ratio_low=0.5, clip_ratio_high=0.25, clip_ratio_c=4.0)
    got, gradient, clipped = one_token(math.log(ratio), advantage, config)
    assert got == pytest.approx(loss, rel=1e-12)
    assert gradient == pytest.approx(-advantage * ratio if passes else 0.0, rel=1e-12)
    assert clipped == (0 if passes else 1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_passes_on_the_bound(advantage: float) -> None:
    """A range of one point, and the ratio in it: the first, on-policy step must not be clipped, nor halved."""
    config = ObjectiveConfig(clip_ratio_low=0.0, clip_ratio_high=0.0)
    assert one_token(0.0, advantage, config) == (-advantage, -advantage, 0)


def test_without_dual_clip_a_bad_token_has_an_unbounded_loss() -> None:
    loss, gradient, clipped = one_token(math.log(50), -1.0, ObjectiveConfig(clip_ratio_c=None))
    assert (loss, gradient, clipped) == (pytest.approx(50), pytest.approx(50), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("clip_ratio_c", [3.0, None])
def test_extreme_log_ratios_are_finite(
    clip_ratio_c: float | None, advantage: float, log_ratio: float, dtype: torch.dtype
) -> None:
    config = replace(FULL, clip_ratio_c=clip_ratio_c)
    n = 3
    response = a_response(
        [1] * n, old_log_probs=np.zeros(n), ref_log_probs=np.zeros(n), advantages=np.full(n, advantage)
    )
    rows = [[np.full(n, log_ratio)]]
    losses, metrics, gradients = shares([a_group(response)], rows, [[np.ones(n)]], config, dtype)
    assert losses[0].item() == pytest.approx(oracle([a_group(response)], rows, [[np.ones(n)]], config), rel=1e-6)
    assert gradients[0].tolist() == [0] * n
    assert all(value.isfinite() for value in metrics[0].values())


def test_on_policy_where_there_are_no_old_log_probs() -> None:
    """The ratio is 1, its gradient is the policy gradient; the sampler's log-probs are not taken for old ones."""
    response = a_response([1, 1], rollout_log_probs=np.array([-9.0, -9.0]), advantages=np.array([2.0, -1.0]))
    rows = [[np.array([-1.0, -2.0])]]
    losses, metrics, gradients = shares([a_group(response)], rows, rows, ObjectiveConfig())
    assert losses[0].item() == -0.5
    assert gradients[0].tolist() == [-1.0, 0.5]
    assert metrics[0]["clip_fraction"] == 0


def test_kl_of_close_policies_keeps_its_digits_in_float32() -> None:
    d = 1e-3
    response = a_response([1], ref_log_probs=np.array([-1.0 + d]))
    *_, metrics = policy_loss(torch.tensor([-1.0]), prepare_batch([a_group(response)], FULL)[0][0], FULL, torch.ones(1))
    assert metrics["kl"].item() == pytest.approx(d * d / 2, rel=1e-3)


def test_metrics_are_means_over_trained_tokens_under_token_mean() -> None:
    groups, log_probs, entropies = a_batch()
    losses, metrics, _ = shares(groups, log_probs, entropies, FULL)
    trained = [
        (g, i, t) for g, x in enumerate(groups) for i, r in enumerate(x.responses) for t in np.flatnonzero(r.mask)
    ]
    sums = {name: sum(m[name].item() for m in metrics) for name in metrics[0]}
    assert set(sums) == {"loss", "weight", "clip_fraction", "kl", "entropy"}
    assert sums["weight"] == pytest.approx(1.0)
    assert sums["loss"] == pytest.approx(sum(losses).item())
    assert sums["entropy"] == pytest.approx(np.mean([entropies[g][i][t] for g, i, t in trained]))
    d = [groups[g].responses[i].ref_log_probs[t] - log_probs[g][i][t] for g, i, t in trained]  # type: ignore[index]
    assert sums["kl"] == pytest.approx(np.mean([min(math.exp(x) - x - 1, 10) for x in d]))
    assert 0 < sums["clip_fraction"] < 1
    assert not any(value.requires_grad for m in metrics for value in m.values())


def test_unused_inputs_get_no_gradient() -> None:
    """With a coefficient of 0, entropy and reference are measured, but take no part in backward (slime#1523)."""
    response = a_response([1, 1], reward=1.0, ref_log_probs=np.array([-3.0, -3.0]))
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([1.0, 2.0], requires_grad=True)
    config = ObjectiveConfig()
    loss, metrics = policy_loss(log_probs, prepare_batch([a_group(response)], config)[0][0], config, entropy)
    loss.backward()
    assert entropy.grad is None
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx([-0.5, -0.5], rel=1e-5)
    assert metrics["entropy"] == 1.5 and metrics["kl"] > 0


def test_advantages_of_the_file_win() -> None:
    group = a_group(a_response([1, 1], reward=1.0, advantages=np.array([5.0, -5.0])), a_response([1], reward=0.0))
    first, second = prepare_batch([group], ObjectiveConfig())[0]
    assert first.advantages.tolist() == [5.0, -5.0]
    assert second.advantages[0] == pytest.approx(-(0.5**0.5), rel=1e-5), "its own uses the rewards of both"


def test_kl_needs_ref_log_probs_where_there_are_tokens() -> None:
    fine = a_group(a_response([]), a_response([1], ref_log_probs=np.zeros(1)))
    targets = prepare_batch([fine], FULL)[0]
    empty = torch.zeros(0, requires_grad=True)
    policy_loss(empty, targets[0], FULL, torch.zeros(0))[0].backward()
    with pytest.raises(RolloutError, match=r"file.jsonl:x.*response 1: ref_logprobs missing.*kl_coef=0.1"):
        prepare_batch([fine, a_group(a_response([]), a_response([0]), name="x")], FULL)
    prepare_batch([a_group(a_response([1]))], ObjectiveConfig())


@pytest.mark.parametrize(
    "log_probs, entropy, words",
    [
        (torch.zeros(3), torch.zeros(2), r"log_probs: needs .* n = 2.*\[3\]"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), "log_probs: needs float32 or float64.*bfloat16"),
        (torch.zeros(2), torch.zeros(2, 1), "entropy: needs"),
        (torch.zeros(2), None, "entropy_coef=0.05 needs it"),
        (torch.zeros(2), torch.zeros(2), "ref_log_probs is missing"),
    ],
    ids=["length", "dtype", "entropy-shape", "no-entropy", "no-reference"],
)
def test_policy_loss_refuses(log_probs: Tensor, entropy: Tensor | None, words: str) -> None:
    targets = TokenTargets(weights=np.ones(2), advantages=np.ones(2))
    with pytest.raises(ValueError, match=words):
        policy_loss(log_probs, targets, FULL, entropy)


def test_targets_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"old_log_probs: needs float64 \[n\] with n = 2"):
        TokenTargets(weights=np.ones(2), advantages=np.ones(2), old_log_probs=np.ones(3))
