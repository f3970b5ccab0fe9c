"""megatron_longstraw: RL post-training on million-token prompts, as a schedule for Megatron-Core."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_longstraw.drop_in import get_forward_backward_func

__version__ = "0.1.0"
__all__ = ["__version__", "get_forward_backward_func"]


def __getattr__(name: str) -> Any:
    # late: torch and Megatron load only where the schedule is asked for
    if name == "get_forward_backward_func":
        from megatron_longstraw.drop_in import get_forward_backward_func

        return get_forward_backward_func
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
