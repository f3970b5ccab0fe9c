"""What a layer's first forward keeps for its recomputation."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_longstraw.attention import prompt_attention
from megatron_longstraw.prompt_state import Phase, Runtime, Segment
from megatron_longstraw.sparse_attention import sparse_attention

TOKENS, HEADS, DIM = 5, 2, 4


def _layer(kind: str, runtime: Runtime, q: Tensor, rows: Tensor) -> Tensor:
    attend = runtime.attend_of(1)
    if kind == "dense":
        return prompt_attention(q, rows[:, None], rows[:, None], None, 0.5, attend=attend)
    chosen = torch.arange(TOKENS, dtype=torch.int32).expand(TOKENS, -1)
    chosen = chosen.where(chosen <= torch.arange(TOKENS)[:, None], -1)
    return sparse_attention(q, rows, chosen, None, value_width=DIM, scale=0.5, query_block=2, attend=attend)


def _run(kind: str, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """The output of a recomputed layer, and its queries."""
    torch.manual_seed(0)
    q, rows = torch.randn(TOKENS, HEADS, DIM, requires_grad=True), torch.randn(TOKENS, DIM)
    runtime.begin(Segment(phase=Phase.RESPONSE, start=0, length=TOKENS))
    resumption = runtime.resumption()
    out = checkpoint(
        lambda q: _layer(kind, runtime, q, rows).cos(),
        q,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), resumption),
    )
    return out, q


def _runtime(keep: bool) -> Runtime:
    runtime = Runtime()
    runtime.keep_attention = keep
    return runtime


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_recomputation_takes_what_was_kept(kind: str) -> None:
    gradients = []
    for keep in (False, True):
        runtime = _runtime(keep)
        out, q = _run(kind, runtime)
        assert list(runtime.micro_batch.attended) == [1] * keep
        out.sum().backward()
        assert not runtime.micro_batch.attended
        gradients.append(q.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_what_is_kept_goes_with_a_graph_that_never_runs_backward(kind: str) -> None:
    runtime = _runtime(True)
    out, _ = _run(kind, runtime)
    kept = [weakref.ref(tensor) for tensor in runtime.micro_batch.attended[1]]
    del out
    runtime.end()
    gc.collect()
    assert kept and not any(tensor() is not None for tensor in kept)


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_runs_backward_once(keep: bool) -> None:
    out, _ = _run("dense", _runtime(keep))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the graph of a micro-batch runs backward once"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("segment", "recomputed"),
    [
        (Segment(phase=Phase.RESPONSE, start=0, length=8), False),
        (Segment(phase=Phase.RESPONSE, start=0, length=9), True),
        (Segment(phase=Phase.PLAIN, start=0, length=8), True),
        (Segment(phase=Phase.IDLE, start=0, length=1, in_place_of=Phase.PLAIN), True),
        (Segment(phase=Phase.IDLE, start=0, length=1, in_place_of=Phase.RESPONSE), False),
    ],
)
def test_which_micro_batches_are_recomputed(segment: Segment, recomputed: bool) -> None:
    runtime = Runtime()
    runtime.recompute_above, runtime.recompute_plain = 8, True
    runtime.begin(segment)
    assert runtime.recomputes == recomputed
    with torch.no_grad():
        assert not runtime.recomputes
    runtime.recompute_above = None
    assert runtime.recomputes == (recomputed and runtime.segment.length != 9)
    runtime.end()  # what one schedule set is not the other's
    runtime.begin(segment)
    assert runtime.recomputes == (segment.phase is Phase.RESPONSE or segment.in_place_of is Phase.RESPONSE)
