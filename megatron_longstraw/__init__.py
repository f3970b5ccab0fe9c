"""megatron_longstraw: RL post-training on million-token prompts, as a schedule for Megatron-Core."""

__version__ = "0.1.0"
