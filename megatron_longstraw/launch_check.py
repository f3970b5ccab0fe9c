"""What launch/ asks of a node before it starts ranks there: ``python -m megatron_longstraw.launch_check``.

It prints how many GPUs torch shows, by CUDA_VISIBLE_DEVICES as the ranks will; or, with exit status 2, one line with
what each rank would refuse minutes later, or torchrun with a traceback.
"""

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_longstraw import distributed
from megatron_longstraw.cli import load_run, make_parser
from megatron_longstraw.config import ConfigError
from megatron_longstraw.doctor import check_files, check_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks a run of ``longstraw train``, and exits."""
    parser = argparse.ArgumentParser()
    for name in ("world-size", "node-rank", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rollouts", "output"):  # whose files the launch script has checked
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("train", nargs=argparse.REMAINDER, help="train and its options")
    options = parser.parse_args(arguments)
    distributed.quiet()
    try:
        _check(options, make_parser().parse_args(options.train))
    except (ConfigError, OSError) as error:
        print("error:", str(error).replace("\n", " "), flush=True)
        sys.exit(2)
    print(torch.cuda.device_count(), flush=True)


def _check(node: argparse.Namespace, train: argparse.Namespace) -> None:
    from megatron_longstraw.trainer import check_trainable

    for name in ("rollouts", "output"):
        if getattr(train, name) != getattr(node, name):
            raise ConfigError(f"--{name} {getattr(train, name)} behind --: needs to stand before it")
    run = load_run(train)
    check_run(run, node.world_size)
    check_trainable(run, train.steps)
    check_files(run)
    if node.node_rank == 0:
        try:
            socket.create_server(("", node.master_port)).close()
        except OSError as error:
            raise ConfigError(f"--master-port {node.master_port}: {error.strerror}; name another") from error


if __name__ == "__main__":
    main()
