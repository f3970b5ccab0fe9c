"""``python -m megatron_longstraw``, also under torchrun."""

from megatron_longstraw.cli import main

main()
