"""The fused log-probs against the dense reference beside them: values, all gradients, memory, ranks.

Not exercised: NCCL; CUDA by one test only, which `make test-gpu` runs.
"""

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_longstraw.logprobs import dense_log_probs, vocab_parallel_log_probs
from tests.ranks import Layout, Ranks

N, H, V = 37, 12, 52


@pytest.fixture(autouse=True)
def nan_in_uninitialised_buffers() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def inputs(n: int = N, h: int = H, v: int = V, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """hidden, weight, targets, and the gradients of log-probs and entropies; logits have a spread of 3 * scale."""
    torch.manual_seed(n * h * v)
    hidden = torch.randn(n, h, dtype=torch.float64) * scale
    weight = torch.randn(v, h, dtype=torch.float64) * 3 / h**0.5
    targets = torch.randint(0, v, (n,))
    if n > 1:
        targets[0], targets[-1] = 0, v - 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [hidden.to(dtype), weight.to(dtype), targets, *(torch.randn(2, n, dtype=torch.float64).to(wide))]


def run(function: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *grads: Tensor | None, **kwargs: Any) -> dict:
    """Outputs and gradients of one call; a gradient that is None takes no part in backward."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = function(hidden, weight, targets, **kwargs)
    pairs = [(o, g) for o, g in zip((log_probs, entropy), grads, strict=True) if g is not None and o is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    result = {"log_probs": log_probs.detach(), "dhidden": hidden.grad, "dweight": weight.grad}
    return result if entropy is None else {**result, "entropy": entropy.detach()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert got[name].isfinite().all(), name
        error = (got[name] - want[name]).double().norm() / want[name].double().norm().clamp(min=1e-300)
        assert error <= tolerance, f"{name}: relative L2 {error:.2e}"


DTYPES = [
    pytest.param(torch.float64, 1e-12, id="float64"),
    pytest.param(torch.float32, 2e-6, id="float32"),
]


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block_tokens", [1, 5, 36, 37, 1000])
def test_equals_dense(
    dtype: torch.dtype, tolerance: float, with_entropy: bool, temperature: float, block_tokens: int
) -> None:
    data = inputs(dtype=dtype)
    kwargs = {"temperature": temperature, "with_entropy": with_entropy}
    got = run(vocab_parallel_log_probs, *data, **kwargs, block_tokens=block_tokens)
    assert_same(got, run(dense_log_probs, *data, **kwargs), tolerance)


@pytest.mark.parametrize("n", [1, 2])
def test_few_tokens_equal_dense(n: int) -> None:
    data = inputs(n=n)
    got = run(vocab_parallel_log_probs, *data, with_entropy=True, block_tokens=2)
    assert_same(got, run(dense_log_probs, *data, with_entropy=True), 1e-12)


def test_dense_equals_python_loops() -> None:
    hidden, weight, targets, *_ = inputs(n=3, v=5)
    log_probs, entropy = dense_log_probs(hidden, weight, targets, temperature=1.3, with_entropy=True)
    assert entropy is not None
    for i in range(3):
        exps = [math.exp(math.sumprod(hidden[i].tolist(), row.tolist()) / 1.3) for row in weight]
        p = [x / sum(exps) for x in exps]
        assert log_probs[i].item() == pytest.approx(math.log(p[targets[i]]), rel=1e-12)
        assert entropy[i].item() == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)


@pytest.mark.parametrize("outputs", ["log_probs", "entropy"])
def test_one_output_without_gradient(outputs: str) -> None:
    hidden, weight, targets, g_log_probs, g_entropy = inputs()
    grads = (g_log_probs, None) if outputs == "log_probs" else (None, g_entropy)
    got = run(vocab_parallel_log_probs, hidden, weight, targets, *grads, with_entropy=True, block_tokens=8)
    assert_same(got, run(dense_log_probs, hidden, weight, targets, *grads, with_entropy=True), 1e-12)


def test_entropy_without_gradient_costs_backward_nothing() -> None:
    """Its backward calls the very operators that it calls where entropy is off."""
    hidden, weight, targets, g, _ = inputs()
    operators = []
    for with_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        log_probs, _ = vocab_parallel_log_probs(leaf, weight, targets, with_entropy=with_entropy, block_tokens=8)
        with Recorder() as recorder:
            log_probs.backward(g)
        operators.append([name for name in recorder.operators if "detach" not in name])  # of saved outputs
    assert operators[0] == operators[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [3e3, 1e20], ids=["logits-1e4", "logits-1e20"])
def test_extreme_logits(dtype: torch.dtype, scale: float) -> None:
    data = inputs(dtype=dtype, scale=scale)
    if scale < 1e10:  # some targets that have a chance beside the best
        data[0][1:20] /= scale
    got = run(vocab_parallel_log_probs, *data, with_entropy=True, block_tokens=8)
    assert_same(got, run(dense_log_probs, *data, with_entropy=True), 2e-6 if dtype == torch.float32 else 1e-12)


def test_a_large_offset_of_all_logits_costs_no_precision_in_backward() -> None:
    """logits 1e4 + small: with the lse as one float32 number the probabilities would be off by 5e-4."""
    hidden, weight, targets, g_log_probs, g_entropy = inputs(dtype=torch.float32)
    hidden, weight = torch.cat([hidden, torch.full((N, 1), 1e2)], 1), torch.cat([weight, torch.full((V, 1), 1e2)], 1)
    data = (hidden, weight, targets, g_log_probs, g_entropy)
    got = run(vocab_parallel_log_probs, *data, with_entropy=True, block_tokens=8)
    assert_same(got, run(dense_log_probs, *data, with_entropy=True), 1e-5)


def check_half_precision(dtype: torch.dtype, device: str) -> None:
    """Errors against float64 are those of the dense reference in the same dtype, or smaller."""
    data = [x.to(device) for x in inputs(n=200, dtype=dtype)]
    wide = [x.double() if x.is_floating_point() else x for x in data]
    want = run(dense_log_probs, *wide, with_entropy=True)
    got = run(vocab_parallel_log_probs, *data, with_entropy=True, block_tokens=16)
    dense = run(dense_log_probs, *data, with_entropy=True)
    assert got["log_probs"].dtype == got["entropy"].dtype == torch.float32
    assert got["dhidden"].dtype == got["dweight"].dtype == dtype
    for name in want:
        error, dense_error = (((x[name].double() - want[name]).norm() / want[name].norm()) for x in (got, dense))
        assert error <= 1.1 * dense_error + 1e-7, f"{name}: {error:.2e}, dense {dense_error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_dense(dtype: torch.dtype) -> None:
    check_half_precision(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_dense_on_cuda(dtype: torch.dtype) -> None:
    """There the weight's gradient is a product of half factors with a float32 result."""
    torch.use_deterministic_algorithms(False)  # cuBLAS wants an environment variable for it
    check_half_precision(dtype, "cuda")


@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
def test_no_tokens(with_entropy: bool) -> None:
    got = run(vocab_parallel_log_probs, *inputs(n=0), with_entropy=with_entropy)
    assert got["log_probs"].shape == (0,) and got["dhidden"].shape == (0, H)
    assert not got["dweight"].any()


def test_frozen_inputs_get_no_gradient() -> None:
    hidden, weight, targets, g, _ = inputs()
    leaf = hidden.clone().requires_grad_()
    vocab_parallel_log_probs(leaf, weight, targets)[0].backward(g)
    want = leaf.grad
    head = weight.clone().requires_grad_()
    vocab_parallel_log_probs(hidden, head, targets)[0].backward(g)
    both = run(vocab_parallel_log_probs, hidden, weight, targets, g, None)
    assert want is not None and torch.equal(want, both["dhidden"])
    assert head.grad is not None and torch.equal(head.grad, both["dweight"])


def test_strided_inputs_and_gradients() -> None:
    hidden, weight, targets, g, _ = inputs()
    strided = (hidden.t().contiguous().t(), weight.repeat(1, 2)[:, :H], targets.repeat_interleave(2)[::2])
    got = run(vocab_parallel_log_probs, *strided, g.repeat_interleave(2)[::2], None, block_tokens=8)
    assert_same(got, run(dense_log_probs, hidden, weight, targets, g, None), 1e-12)
    leaf = hidden.clone().requires_grad_()
    vocab_parallel_log_probs(leaf, weight, targets, block_tokens=8)[0].sum().backward()  # an expanded gradient
    assert leaf.grad is not None
    torch.testing.assert_close(
        leaf.grad, run(dense_log_probs, hidden, weight, targets, torch.ones_like(g), None)["dhidden"]
    )


class Recorder(TorchDispatchMode):
    """Operators called, the largest tensor that they gave, and the peak of elements alive that they allocated."""

    def __init__(self, *there: Tensor) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.largest = self.alive = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.append(str(func))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, elements = storage._cdata, storage.nbytes() // 8
        if key not in self._seen:
            self._seen.add(key)
            self.alive += elements
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, key, elements)

    def _gone(self, key: int, elements: int) -> None:
        self._seen.discard(key)
        self.alive -= elements


@pytest.mark.parametrize("with_entropy, blocks", [(False, 1), (True, 2)], ids=["plain", "entropy"])
def test_one_block_of_logits_is_alive(with_entropy: bool, blocks: int) -> None:
    n, h, v, block = 512, 2, 64, 16
    hidden, weight, targets, g_log_probs, g_entropy = inputs(n, h, v)
    hidden.requires_grad_(), weight.requires_grad_()
    kwargs = {"block_tokens": block, "with_entropy": with_entropy, "temperature": 0.5}
    with Recorder(hidden, weight, targets) as forward:
        outputs = vocab_parallel_log_probs(hidden, weight, targets, **kwargs)
    kept = [tensor for tensor in outputs[0].grad_fn.saved_tensors if tensor is not None]
    with Recorder(*kept, g_log_probs, g_entropy) as backward:
        if with_entropy:
            torch.autograd.backward(outputs, (g_log_probs, g_entropy))
        else:
            outputs[0].backward(g_log_probs)
    assert max(forward.largest, backward.largest) <= block * v
    per_block = blocks * block * v + 20 * block  # and some numbers per token of the block
    assert forward.peak <= per_block + (4 if with_entropy else 3) * n
    assert backward.peak <= per_block + hidden.numel() + weight.numel()
    with Recorder() as dense:  # the counter does see what it should
        dense_log_probs(hidden, weight, targets)
    assert dense.largest == n * v and dense.peak >= 2 * n * v


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden": torch.zeros(3)}, "needs hidden"),
        ({"weight": torch.zeros(5, 3)}, "needs hidden"),
        ({"weight": torch.zeros(0, 2)}, "at least one row"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "needs targets"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "int32"),
        ({"weight": torch.zeros(5, 2, dtype=torch.float64)}, "of one dtype"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"block_tokens": 0}, "block_tokens=0"),
    ],
)
def test_refuses(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(3, 2),
        "weight": torch.zeros(5, 2),
        "targets": torch.zeros(3, dtype=torch.int64),
        **change,
    }
    with pytest.raises(ValueError, match=words):
        vocab_parallel_log_probs(**arguments)


def sharded_body(n: int, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """A rank's outputs and gradients: the gradient of hidden is its share, that of the weight its rows."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, *rest = inputs(n)
    shard = weight.chunk(group.size())[group.rank()]
    return run(vocab_parallel_log_probs, hidden, shard, *rest, group=group, **kwargs)


def collectives_body() -> tuple[list[str], list[str]]:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, targets, *gradients = inputs()
    shard = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    with Recorder() as forward:
        outputs = vocab_parallel_log_probs(hidden, shard, targets, group=group, with_entropy=True, block_tokens=5)
    with Recorder() as backward:
        torch.autograd.backward(outputs, gradients)
    return [name for name in forward.operators if "c10d" in name], [
        name for name in backward.operators if "c10d" in name
    ]


def test_two_collectives_per_block_in_forward_and_none_in_backward(ranks: Ranks) -> None:
    for forward, backward in ranks.run(Layout(tp=2), collectives_body):
        assert forward == ["c10d.allreduce_.default"] * 2 * math.ceil(N / 5)
        assert backward == []


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("with_entropy", [False, True], ids=["plain", "entropy"])
def test_ranks_equal_one_rank(ranks: Ranks, layout: Layout, with_entropy: bool) -> None:
    kwargs = {"block_tokens": 5, "temperature": 0.7, "with_entropy": with_entropy}
    want = run(vocab_parallel_log_probs, *inputs(), **kwargs)
    results = ranks.run(layout, sharded_body, N, kwargs)
    for first in range(0, layout.world_size, layout.tp):
        group = results[first : first + layout.tp]
        for result in group:
            whole = {
                **result,
                "dhidden": sum(r["dhidden"] for r in group),
                "dweight": torch.cat([r["dweight"] for r in group]),
            }
            assert_same(whole, want, 1e-12)
            assert torch.equal(result["log_probs"], group[0]["log_probs"])
            assert not torch.allclose(result["dhidden"], want["dhidden"], rtol=1e-3), "is not the rank's share only"


def test_no_tokens_on_ranks(ranks: Ranks) -> None:
    for result in ranks.run(Layout(tp=2), sharded_body, 0, {}):
        assert result["log_probs"].shape == (0,) and not result["dweight"].any()
