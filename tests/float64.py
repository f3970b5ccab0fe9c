"""Float64 all the way through code that casts to float32 inside, as Megatron's and transformers' modules do.

Those casts are the floor of a float64 comparison (1e-7 instead of 1e-15). Nothing is patched: while the mode is
entered, float64 tensors stay what they are where Python code asks for float32, and a tensor that is made as
float32 by its name ("dtype=torch.float32") is left alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """While entered, ``x.float()`` and ``x.to(torch.float32)`` give a float64 tensor back as it is.

    Enter it around forward *and* backward, since recomputation runs modules again. What operators do inside is
    not changed, nor is anything in another thread.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)
