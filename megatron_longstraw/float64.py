"""Float64 all the way through code that casts to float32 inside, as Megatron's modules do; for comparisons only.

Those casts are the floor of a float64 comparison (1e-7 instead of 1e-15). While `keep_float64` is entered,
float64 tensors stay what they are where Python code asks for float32; a tensor that is *made* as float32 by its
name ("dtype=torch.float32") is left alone. The methods are replaced, since a TorchFunctionMode is off within
``torch.autograd.backward``, where recomputation runs modules again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_METHODS = ("float", "to", "type")


@contextlib.contextmanager
def keep_float64() -> Iterator[None]:
    """While entered, ``x.float()`` and ``x.to(torch.float32)`` give a float64 tensor back as it is.

    Enter it around forward and backward. What operators do inside is not changed.
    """
    tensor: Any = torch.Tensor
    for name in _METHODS:
        assert name not in vars(tensor)  # inherited: deleting ours brings it back
        setattr(tensor, name, _widened(getattr(tensor, name)))
    try:
        yield
    finally:
        for name in _METHODS:
            delattr(tensor, name)


def _widened(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is torch.float64:
            if method.__name__ == "float":
                return self
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return method(self, *args, **kwargs)

    return call
