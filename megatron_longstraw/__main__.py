"""``python -m megatron_longstraw``, also under torchrun."""

import os
import sys
import time

from megatron_longstraw.cli import main

try:
    main()
except SystemExit as end:
    dist = sys.modules.get("torch.distributed")
    if end.code == 2 and dist is not None and dist.is_initialized():
        # Taken down in order, after an error, threads of a rank's communicators may abort it. Not at once, as torchrun
        # ends all ranks once one has ended, and the one that failed is to say why.
        time.sleep(1.0)
        sys.stdout.flush()
        os._exit(2)
    raise
