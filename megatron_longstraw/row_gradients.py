"""Where the gradient that a prompt's rows have gathered enters the backward of the prompt chunk that wrote them.

Shapes: T tokens of the chunk, H query heads of this rank, D dimension of a query, V of its output.
"""

import torch
from torch import Tensor

from megatron_longstraw.prompt_state import OwnedRows, Segment


def inject_row_gradients(rows: OwnedRows, segment: Segment, **fields: Tensor) -> tuple[Tensor, ...]:
    """Identity on what a prompt chunk writes; backward adds, on each row's owner, the gradient that the row gathered.

    Args:
        fields: those of `rows` that have gradients, each [T, *shape].

    Returns:
        The fields, in their order.
    """
    return _Inject.apply(rows, segment, tuple(fields), *fields.values())


def root_at_rows(q_THD: Tensor, value_width: int, rows: OwnedRows, segment: Segment, **fields: Tensor) -> Tensor:
    """In place of attention where only the rows matter (the last layer of a prompt chunk).

    Returns zeros [T, H, V]; backward ignores their gradient, gives the fields what their rows gathered, and frees the
    rows' values: responses are behind us then, and prompt chunks don't read them here.
    """
    return _Root.apply(q_THD, value_width, rows, segment, tuple(fields), *fields.values())


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: OwnedRows, segment: Segment, names: tuple[str, ...], *fields: Tensor):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.segment, ctx.names = rows, segment, names
        return tuple(field.view_as(field) for field in fields)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[no-untyped-def]
        gradients = tuple(gradient.clone() for gradient in gradients)
        ctx.rows.take_gradient(ctx.segment, **dict(zip(ctx.names, gradients, strict=True)))
        return None, None, None, *gradients


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, value_width: int, rows: OwnedRows, segment: Segment, names: tuple[str, ...], *fields: Tensor):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.segment, ctx.names = rows, segment, names
        ctx.q_shape, ctx.shapes = q.shape, [field.shape for field in fields]
        return q.new_zeros(*q.shape[:2], value_width)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        gradients = [dout.new_zeros(shape) for shape in ctx.shapes]
        ctx.rows.take_gradient(ctx.segment, **dict(zip(ctx.names, gradients, strict=True)))
        ctx.rows.drop(*ctx.names)
        return dout.new_zeros(ctx.q_shape), None, None, None, None, *gradients
