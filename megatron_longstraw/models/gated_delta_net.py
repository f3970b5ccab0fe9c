"""Megatron's Gated DeltaNet carried over prompt chunks (arXiv 2412.06464).

The layer's state after a token is the recurrent state S [heads, key dim, value dim] of the delta rule and the
last rows that went into the causal convolution. `PromptGatedDeltaNet` starts a segment from the state at the
segment's first position and, for a prompt chunk, keeps the state after its last. Stock sequences run Megatron's
own forward.

- capture: start from the boundary, write the next one, no autograd.
- response: start from the last boundary, each of those that are packed; backward adds dL/d(that boundary).
- prompt backward: start from the boundary; backward first adds what the next boundary's gradient has gathered
  to the final state's, then adds dL/d(its own boundary).
- Padding of sequence parallelism follows a segment's tokens. It is cut off before the convolution, so that it
  moves neither state, and comes back as zeros before the output projection.

Which kernels run is chosen once, when the config is made, by `resolve_delta_rule`: flash-linear-attention's
where it imports and there is a GPU, else Megatron's own torch functions (``deterministic_mode``). The former
are called as version 0.4 declares them, and have run a capture on an H200, but not been compared yet.

Packed responses start from the same state: those that are about as long are a batch of the convolution and the rule.

Shapes: B sequences (a prompt chunk is one), T tokens of the segment or of the longest of a batch, C convolution
channels of this rank (queries, keys, values), K convolution width, H value heads of this rank, [D, E] key and value
dimensions of a head.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from torch import Tensor
from torch.nn import functional as F

from megatron_longstraw.config import ConfigError
from megatron_longstraw.prompt_state import Phase, Runtime, Segment
from megatron_longstraw.recurrent_state import BoundaryStates

RULE_CHUNK = 64
"""Tokens of a chunk of the delta rule, to which Megatron's torch function pads a sequence."""


def resolve_delta_rule(deterministic_mode: bool | None) -> str:
    """Which kernels Gated DeltaNet layers use: "flash-linear-attention" or "torch".

    Args:
        deterministic_mode: Megatron's setting; True asks for torch, False for flash-linear-attention, None for
            whichever can be used here.

    Raises:
        ConfigError: flash-linear-attention is asked for and can't be used here.
    """
    usable = common.HAVE_FLA and torch.cuda.is_available()
    if deterministic_mode or (deterministic_mode is None and not usable):
        return "torch"
    if not usable:
        reason = "there is no GPU" if common.HAVE_FLA else "flash-linear-attention does not import"
        raise ConfigError(
            f"model.transformer.deterministic_mode=False can't be used: {reason}; leave it unset, or set True"
        )
    return "flash-linear-attention"


class PromptGatedDeltaNet(GatedDeltaNet):
    """Megatron's GatedDeltaNet, started from and leaving the prompt's boundary states.

    Args:
        runtime: the model's runtime.
        others: as Megatron's.

    Raises:
        ConfigError: tensor parallelism without sequence parallelism.
    """

    def __init__(self, config: Any, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise ConfigError(
                f"sequence_parallel=False with tensor_model_parallel_size={config.tensor_model_parallel_size}: "
                "Megatron's GatedDeltaNet then leaves the gradient of out_norm unreduced; "
                "set parallel.sequence_parallel to true, or leave it unset"
            )
        with _torch_functions_suffice(config):
            super().__init__(config, *args, **kwargs)
        self.runtime = runtime
        self.is_last = self.layer_number == config.num_layers
        # for megatron_longstraw.models.parameters: these are cut over TP section by section
        self.in_proj.weight.partition_sections = tuple(self.in_proj_split_sections)
        self.conv1d.weight.partition_sections = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, hidden] to [T, 1, hidden] (T of this rank under sequence parallelism), and no bias."""
        segment = self.runtime.segment
        if segment.phase in (Phase.PLAIN, Phase.IDLE):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        if kwargs.get("packed_seq_params") is not None or hidden_states.shape[1] != 1:
            raise ValueError(
                "a prompt's Gated DeltaNet takes micro-batches [T, 1, hidden], without Megatron's packing: got size "
                f"{hidden_states.shape[1]}, packing {'on' if kwargs.get('packed_seq_params') is not None else 'off'}"
            )
        return self._forward_segment(hidden_states, segment)

    def _forward_segment(self, hidden_states: Tensor, segment: Segment) -> tuple[Tensor, Tensor | None]:
        projected, _ = self.in_proj(hidden_states)
        padding = projected.shape[0] - segment.length
        qkv, gate, beta, alpha = projected[: segment.length].transpose(0, 1).split(self.feat_dim_split, dim=-1)
        boundaries = self._boundaries()
        recurrent_state, conv_state = self._initial_state(boundaries, segment, qkv)
        lengths = segment.lengths
        sequences = [x.split(lengths, dim=1) for x in (qkv, beta, alpha)]
        outs: dict[int, Tensor] = {}
        for alike in _as_long_for_the_rule(lengths):
            of_alike, beta_of_alike, alpha_of_alike = (_batch([x[i] for i in alike]) for x in sequences)
            convolved, end_conv_state = self._convolve(of_alike, conv_state.expand(len(alike), -1, -1))
            start = None if recurrent_state is None else recurrent_state.expand(len(alike), -1, -1, -1)
            out, end_state = self._delta_rule(convolved, beta_of_alike, alpha_of_alike, start, segment.is_prompt)
            outs |= {i: one[:, : lengths[i]] for i, one in zip(alike, out.split(1), strict=True)}
        out = torch.cat([outs[i] for i in range(len(lengths))], 1)

        if segment.is_prompt:
            assert boundaries is not None and end_state is not None
            if segment.phase is not Phase.PROMPT:
                keep = boundaries.write if segment.phase is Phase.CAPTURE else boundaries.write_again
                keep(segment.start, segment.end, recurrent_state=end_state, conv_state=end_conv_state.clone())
                if self.is_last:
                    return torch.zeros_like(hidden_states), None
            else:
                if self.is_last:  # nobody reads the output; the rule runs backwards for its final state only
                    out = torch.zeros_like(out)
                out = inject_boundary_gradient(out, end_state, end_conv_state, boundaries, segment)
        normed = self._gated_norm_and_a2a(
            out, gate.reshape(1, segment.length, -1, self.value_head_dim), None, 1, segment.length
        )
        return self.out_proj(F.pad(normed, (0, 0, 0, 0, 0, padding)))

    def _boundaries(self) -> BoundaryStates | None:
        """The layer's boundaries; None for a prompt of one token, which has no state."""
        state = self.runtime.current_state()
        return state.boundaries(self.layer_number) if state.length else None

    def _initial_state(
        self, boundaries: BoundaryStates | None, segment: Segment, qkv: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """(recurrent state [1, H, D, E] or None for zeros, convolution rows [1, K - 1, C]) at the segment's start."""
        if boundaries is None or segment.start == 0:
            return None, qkv.new_zeros(1, self.conv_kernel_dim - 1, qkv.shape[-1])
        return read_boundary(boundaries, segment.start)

    def _convolve(self, qkv: Tensor, conv_state: Tensor) -> tuple[Tensor, Tensor]:
        """Causal convolution and activation of [B, T, C] behind conv_state; also returns the next conv_state."""
        rows = torch.cat([conv_state, qkv], dim=1)
        following = rows[:, qkv.shape[1] :]
        if self.config.deterministic_mode:
            out = F.conv1d(
                rows.transpose(1, 2).contiguous(), self.conv1d.weight, self.conv1d.bias, groups=rows.shape[-1]
            )
            return self.act_fn(out).transpose(1, 2), following
        out, _ = common.causal_conv1d(
            x=rows, weight=self.conv1d.weight.squeeze(1), bias=self.conv1d.bias, activation=self.activation
        )
        return out[:, conv_state.shape[1] :], following

    def _delta_rule(
        self, qkv: Tensor, beta: Tensor, alpha: Tensor, initial_state: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(out [B, T, H, E], final state [B, H, D, E] if asked for)."""
        no_gate = qkv[..., :0]  # Megatron only passes it through, and it is applied behind the rule
        query, key, value, _, beta, alpha = self._prepare_input_for_gated_delta_rule(
            qkv, no_gate, *qkv.shape[:2], beta, alpha
        )
        g, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        return self.gated_delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=final,
            use_qk_l2norm_in_kernel=False,
        )


def _as_long_for_the_rule(lengths: Sequence[int]) -> list[list[int]]:
    """Which of the sequences have as many of the delta rule's chunks, to which it pads them in any case."""
    alike: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        alike.setdefault(-(-length // RULE_CHUNK), []).append(i)
    return list(alike.values())


def _batch(sequences: Sequence[Tensor]) -> Tensor:
    """Sequences [1, tokens, ...] as [B, tokens of the longest, ...], with zeros behind the shorter ones.

    Not torch's pad_sequence, whose backward copies the whole batch once a sequence.
    """
    longest = max(x.shape[1] for x in sequences)
    same = [x if x.shape[1] == longest else F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in sequences]
    return same[0] if len(same) == 1 else torch.cat(same)


def read_boundary(boundaries: BoundaryStates, position: int) -> tuple[Tensor, Tensor]:
    """(recurrent state, convolution rows) at a boundary; backward adds their gradients to it."""
    state = boundaries.read(position)
    assert state is not None
    recurrent_state, conv_state = state["recurrent_state"], state["conv_state"]
    if not (torch.is_grad_enabled() and boundaries.wants_gradient):
        return recurrent_state, conv_state
    anchor = recurrent_state.new_empty(0).requires_grad_()  # makes autograd pass here; it gets no gradient
    return _ReadBoundary.apply(anchor, recurrent_state, conv_state, boundaries, position)


def inject_boundary_gradient(
    out: Tensor, recurrent_state: Tensor, conv_state: Tensor, boundaries: BoundaryStates, segment: Segment
) -> Tensor:
    """Identity on a prompt chunk's output; backward gives the chunk's final state what its boundary gathered."""
    return _InjectBoundaryGradient.apply(out, recurrent_state, conv_state, boundaries, segment)


class _ReadBoundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, recurrent_state, conv_state, boundaries: BoundaryStates, position: int):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.boundaries, ctx.position = boundaries, position
        return recurrent_state.view_as(recurrent_state), conv_state.view_as(conv_state)

    @staticmethod
    def backward(ctx, drecurrent_state, dconv_state):  # type: ignore[no-untyped-def]
        ctx.boundaries.add_gradient(ctx.position, recurrent_state=drecurrent_state, conv_state=dconv_state)
        return None, None, None, None, None


class _InjectBoundaryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, recurrent_state, conv_state, boundaries: BoundaryStates, segment: Segment):  # type: ignore[no-untyped-def]
        ctx.boundaries, ctx.segment = boundaries, segment
        ctx.dtypes = recurrent_state.dtype, conv_state.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        gathered = ctx.boundaries.take_gradient(ctx.segment.start, ctx.segment.end)
        drecurrent_state, dconv_state = (
            gathered[name].to(dtype) if name in gathered else None
            for name, dtype in zip(("recurrent_state", "conv_state"), ctx.dtypes, strict=True)
        )
        return dout, drecurrent_state, dconv_state, None, None


@contextlib.contextmanager
def _torch_functions_suffice(config: Any) -> Iterator[None]:
    """Lets Megatron build the layer without flash-linear-attention where only torch functions will run.

    Megatron 0.19.2 raises without it in ``deterministic_mode`` too, although all that mode takes from it is the
    function l2norm; where that is missing it is given here, for good.
    """
    if common.HAVE_FLA or not config.deterministic_mode:
        yield
        return
    common.l2norm = _l2norm
    common.HAVE_FLA = True
    try:
        yield
    finally:
        common.HAVE_FLA = False


def _l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x / |x|, as flash-linear-attention's l2norm: the sum of squares is float32, or float64 for float64."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)
