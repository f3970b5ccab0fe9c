"""A script as Megatron's users write it: arguments, a model provider, batches, and Megatron's own `train`.

Run by tests.test_patches on ranks of torchrun, with a patched megatron/training first on the path:

    python -m tests.megatron_host OUT --longstraw MEGATRON_ARGUMENTS...

trains two models from the same weights, one without --longstraw and one with it, and writes to OUT.<rank> of each the
gradients of both steps, the evaluation's losses and the weights at the end. With --installed in place of --longstraw
the second is run by `install` and `adopt`, which need no patch; with --pretrain-gpt both are run by the forward step
and loss of pretrain_gpt.py, which must be on the path.
"""

import argparse
import functools
import importlib
import itertools
import os
import sys
from typing import Any

from megatron_longstraw import cpu_platform, distributed

distributed.quiet()
cpu_platform.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402
from megatron.training import arguments, get_args, get_timers, training  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args  # noqa: E402

from megatron_longstraw.config import ParallelConfig, ScheduleConfig  # noqa: E402
from megatron_longstraw.integrations.megatron import adopt, install  # noqa: E402
from tests.hosts import edge_samples, forward_step, triple_loss  # noqa: E402


def model_provider(
    pre_process: bool, post_process: bool, vp_stage: int | None = None, config: Any = None, pg_collection: Any = None
) -> GPTModel:
    args = get_args()
    model = GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    return model


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--pretrain-gpt", action="store_true")
    parser.add_argument("--installed", action="store_true")
    return parser


def trained(args: Any, adopted: bool) -> dict[str, Any]:
    """A model from the seed's weights, after Megatron's own training and evaluation."""
    torch.manual_seed(args.seed)
    args.iteration = args.consumed_train_samples = 0
    model, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider)
    if adopted:
        adopt(model)
    samples = edge_samples()
    assert get_num_microbatches() == len(samples)
    names = [(name, p) for chunk in model for name, p in chunk.module.named_parameters()]
    gradients, inner = [], optimizer.step

    def step() -> Any:
        gradients.append({name: p.main_grad.clone() for name, p in names})
        return inner()

    optimizer.step = step
    forward: Any = functools.partial(forward_step, triple_loss)
    if args.pretrain_gpt:
        forward = importlib.import_module("pretrain_gpt").forward_step
    # pretrain_gpt.py has iterators on the first tensor-parallel rank only
    has_data = not args.pretrain_gpt or parallel_state.get_tensor_model_parallel_rank() == 0
    batches, config = itertools.cycle(samples) if has_data else None, model[0].config
    training.train(forward, model, optimizer, scheduler, batches, None, None, config, {}, None)
    get_timers()("interval-time").stop()  # train() leaves it running, and starts it
    losses = training.evaluate(forward, itertools.cycle(samples) if has_data else None, model, None, config)[0]
    return {
        "model": type(model[0].module).__name__,
        "gradients": gradients,
        "losses": losses,
        "weights": {name: p.detach().clone() for name, p in names},
    }


def main(out: str) -> None:
    arguments.get_device_arch_version = lambda: 10  # Megatron asks the GPU
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    torch.distributed.init_process_group("gloo")
    layout = ParallelConfig(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size)
    distributed.initialize_model_parallel(layout)
    assert args.installed or args.longstraw  # and validated
    results = {}
    for name in ("stock", "longstraw"):
        if not args.installed:
            args.longstraw = name == "longstraw"
        elif name == "longstraw":
            assert install(ScheduleConfig(prompt_chunk_tokens=16, page_tokens=5)) == ["megatron.training.training"]
        results[name] = trained(args, adopted=args.installed and name == "longstraw")
    torch.save(results, f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main(sys.argv.pop(1))
