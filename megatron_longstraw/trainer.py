"""The optimizer loop: rollout groups in, GRPO steps of Megatron's distributed optimizer out."""

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from safetensors.torch import save_file
from torch import Tensor

from megatron_longstraw.config import ConfigError, RunConfig
from megatron_longstraw.distributed import PeerError, StopSignal, together
from megatron_longstraw.measure import PHASES, NonFiniteGradientError, PeakBytes, StepMeter, screen_of
from megatron_longstraw.models import DTYPES, build_model, weight_map
from megatron_longstraw.models.layers import HeadInput, log_prob_head
from megatron_longstraw.models.parameters import named_tensors
from megatron_longstraw.objectives import TokenTargets, policy_loss, prepare_batch
from megatron_longstraw.rollouts import RolloutGroup, load_tokenizer, read_groups
from megatron_longstraw.schedule import ForwardStep, check_model, forward_backward
from megatron_longstraw.weights import load_weights
from megatron_longstraw.work import PromptGroup, WorkItem


@dataclass(frozen=True, kw_only=True)
class GroupTargets:
    """What the forward step needs of a group besides its tokens; the payload of a `PromptGroup`."""

    responses: Sequence[TokenTargets]
    temperature: float


def build_ddp_model(run: RunConfig, *, plain_attention: str = "longstraw") -> list[Any]:
    """This rank's model chunks in Megatron's Float16Module (bfloat16 only) and DistributedDataParallel."""
    chunks: list[Any] = build_model(run, plain_attention=plain_attention)
    if run.model.weights is not None:
        with together(ConfigError, OSError):
            load_weights(chunks, run.model.weights, weight_map(run))
    config = chunks[0].config
    if run.dtype == "bfloat16":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.dtype == "bfloat16",
        overlap_grad_reduce=False,  # gradients are reduced once, after the last group
        use_distributed_optimizer=True,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def unwrapped(model: Sequence[Any]) -> list[Any]:
    """The GPT models inside DistributedDataParallel and Float16Module."""
    chunks = []
    for chunk in model:
        while not hasattr(chunk, "runtime"):
            chunk = chunk.module
        chunks.append(chunk)
    return chunks


def prompt_groups(groups: Sequence[RolloutGroup], run: RunConfig, device: torch.device) -> list[PromptGroup]:
    """This data-parallel rank's share of a global batch, with token weights that were computed from all of it."""
    targets = prepare_batch(groups, run.objective)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def to_device(ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).to(device)

    return [
        PromptGroup(
            prompt=to_device(group.prompt_ids),
            responses=[to_device(response.ids) for response in group.responses],
            payload=GroupTargets(responses=group_targets, temperature=group.temperature),
        )
        for group, group_targets in itertools.islice(zip(groups, targets, strict=True), rank, None, size)
    ]


def grpo_forward_step(run: RunConfig, keep_log_probs: bool = False) -> ForwardStep:
    """The forward step of the objective, for `megatron_longstraw.schedule` and for the stock schedule alike.

    Args:
        run: the run configuration.
        keep_log_probs: report each response's log-probs [n] under "log_probs".
    """
    with_entropy = run.objective.entropy_coef > 0

    def forward_step(items: Iterator[WorkItem], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        item = next(items)
        payload: GroupTargets | None = item.group.payload  # None: other ranks have a group now, and this one none
        head = HeadInput(
            targets=item.targets,
            first_row=item.first_row,
            temperature=1.0 if payload is None else payload.temperature,
            block_tokens=run.schedule.log_prob_block_tokens,
            with_entropy=with_entropy,
        )
        output = model(
            item.tokens, item.position_ids, None, output_processor=log_prob_head, output_processor_context=head
        )

        def loss_func(output: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
            assert payload is not None
            losses, reports = [], []
            for index, of_response in zip(item.responses, output.split(item.target_counts, 1), strict=True):
                entropy = of_response[1] if with_entropy else None
                loss, report = policy_loss(of_response[0], payload.responses[index], run.objective, entropy)
                if keep_log_probs:
                    report["log_probs"] = of_response[0].detach()
                losses.append(loss)
                reports.append(report)
            return torch.stack(losses).sum(), reports

        return output, loss_func

    return forward_step


def summed_reports(reports: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, float]:
    """The loss, summed over all ranks' responses, and weighted means of what else they report; on every rank."""
    names = ("loss", "weight", "clip_fraction", "kl", "entropy")
    totals = torch.zeros(len(names), dtype=torch.float64, device=device)
    present = torch.zeros(len(names), dtype=torch.float64, device=device)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # the TP ranks of the last stage report the same
        for report in reports:
            for i, name in enumerate(names):
                if name in report:
                    totals[i] += report[name]
                    present[i] = 1
    dist.all_reduce(totals)
    dist.all_reduce(present)
    sums = {name: totals[i].item() for i, name in enumerate(names) if name == "loss" or present[i] > 0}
    weight = sums.pop("weight", 0.0) or 1.0
    return {name: value if name == "loss" else value / weight for name, value in sums.items()}


class Trainer:
    """Runs optimizer steps over rollout groups.

    Args:
        run: the run configuration; Megatron's parallel state is laid out as it says.
        steps: steps of the whole run, for the learning-rate schedule.
        device: this rank's.
    """

    def __init__(self, run: RunConfig, steps: int, device: torch.device) -> None:
        self.run, self.device = run, device
        self.steps_done = 0
        self.model = build_ddp_model(run)
        optimizer = run.optimizer
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                min_lr=optimizer.min_lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.adam_beta1,
                adam_beta2=optimizer.adam_beta2,
                adam_eps=optimizer.adam_eps,
                clip_grad=optimizer.clip_grad,
                bf16=run.dtype == "bfloat16",
                params_dtype=DTYPES[run.dtype],
                use_distributed_optimizer=True,
            ),
            self.model,
            use_gloo_process_groups=False,
        )
        check_model(self.model)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=optimizer.lr_warmup_steps,
            lr_decay_steps=steps,
            lr_decay_style=optimizer.lr_decay_style,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=steps,
            wd_incr_style="constant",
        )
        self._forward_step = grpo_forward_step(run)

    def step(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """One optimizer step over a global batch; every rank gives the same groups. Returns its metrics."""
        start = time.perf_counter()
        mine = prompt_groups(groups, self.run, self.device)
        meter = StepMeter(mine, screen_of(dist.get_rank()))
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with PeakBytes(persistent_tensors(self.model)) as memory:
            reports = forward_backward(
                forward_step_func=self._forward_step,
                data_iterator=iter(mine),
                model=self.model,
                num_microbatches=len(mine),
                options=self.run.schedule,
                observer=meter,
            )
            self._check_finite(groups)
            learning_rate = self.optimizer.param_groups[0]["lr"]
            _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        self.steps_done += 1
        meter.close()
        responses = [r for group in groups for r in group.responses]
        seconds = largest({phase: meter.seconds.get(phase, 0.0) for phase in PHASES}, self.device)
        bytes_ = largest(
            {"state": meter.state_bytes, "state_gradient": meter.state_gradient_bytes, "peak": memory.peak}, self.device
        )
        return {
            **summed_reports(reports, self.device),
            "reward_mean": float(np.mean([r.reward for r in responses])),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": learning_rate,
            "groups": len(groups),
            "responses": len(responses),
            "prompt_tokens": sum(len(group.prompt_ids) for group in groups),
            "response_tokens": sum(len(r.ids) for r in responses),
            "trained_tokens": int(sum(r.mask.sum() for r in responses)),
            "seconds": {"step": time.perf_counter() - start, **seconds},
            "state_bytes": int(bytes_["state"]),
            "state_gradient_bytes": int(bytes_["state_gradient"]),
            "peak_bytes": int(bytes_["peak"]),
        }

    def _check_finite(self, groups: Sequence[RolloutGroup]) -> None:
        """Stops all ranks, with the weights as they were, where any rank's gradient is not finite."""
        buffers = [b for chunk in self.model for b in chunk.buffers + chunk.expert_parallel_buffers]
        # in pieces: isfinite makes a copy
        finite = all(bool(piece.isfinite().all()) for b in buffers for piece in b.grad_data.split(2**24))
        with together(NonFiniteGradientError):
            if not finite:
                raise NonFiniteGradientError(self.steps_done + 1, [group.group_id for group in groups])

    def save(self, folder: Path) -> None:
        """Writes this rank's weights and expert biases, by their names in the whole model, to `folder`.

        One safetensors file per tensor- and pipeline-parallel rank, which data-parallel rank 0 writes; experts are
        in files of their own, one per expert- and pipeline-parallel rank. The optimizer's state is not written.
        """
        shared: dict[str, Tensor] = {}
        experts: dict[str, Tensor] = {}
        for item in named_tensors(unwrapped(self.model)):
            (experts if item.is_expert else shared)[item.name] = item.tensor.detach().cpu().contiguous()
        pp = parallel_state.get_pipeline_model_parallel_rank()
        folder.mkdir(parents=True, exist_ok=True)
        if parallel_state.get_data_parallel_rank() == 0:
            tp = parallel_state.get_tensor_model_parallel_rank()
            save_file(shared, folder / f"tp{tp:02d}-pp{pp:02d}.safetensors")
        if experts and parallel_state.get_expert_data_parallel_rank() == 0:
            ep = parallel_state.get_expert_model_parallel_rank()
            save_file(experts, folder / f"experts-ep{ep:02d}-pp{pp:02d}.safetensors")
        dist.barrier()


def persistent_tensors(model: Sequence[Any]) -> list[Tensor]:
    """Parameters and gradient buffers: what is there before a step and after it."""
    tensors: list[Tensor] = []
    for chunk in model:
        tensors += chunk.parameters()
        tensors += [buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return tensors


def check_trainable(run: RunConfig, steps: int | None) -> None:
    """Raises ConfigError where the optimizer can't take the run, of so many steps if that is known."""
    if steps is not None and run.optimizer.lr_warmup_steps >= steps:
        raise ConfigError(
            f"optimizer.lr_warmup_steps={run.optimizer.lr_warmup_steps}: needs less than the run's {steps} steps"
        )
    if run.dtype == "float64":
        raise ConfigError("dtype=float64 is for compare: Megatron's distributed optimizer takes float32 and bfloat16")


def run_reader(run: RunConfig, rollouts: Path) -> Callable[[], Iterator[RolloutGroup]]:
    """A function that reads the rollout file from its start, checked against the run."""
    if rollouts.exists() and not rollouts.is_file():
        raise ConfigError(f"--rollouts {rollouts}: needs a regular file; every rank reads it, and more than once")
    tokenizer = load_tokenizer(run.data.tokenizer)

    def read() -> Iterator[RolloutGroup]:
        return read_groups(
            rollouts,
            tokenizer=tokenizer,
            vocab_size=run.model.vocab_size,
            temperature=run.data.temperature,
            max_prompt_tokens=run.data.max_prompt_tokens,
            require_ref_log_probs=run.objective.kl_coef > 0,
        )

    return read


def train(run: RunConfig, rollouts: Path, output: Path, steps: int | None, device: torch.device) -> int | None:
    """Trains over a rollout file, once through it or for a number of steps, and saves the weights.

    SIGINT or SIGTERM to any rank ends it after the current step; a second one ends that rank at once.

    Args:
        run: the run configuration; Megatron's parallel state is laid out as it says.
        rollouts: the JSONL file; all of it is checked before the first step.
        output: gets ``metrics.jsonl``, a line a step, and ``weights/``.
        steps: optimizer steps; past the end the file is read again. None: once through it.
        device: this rank's.

    Returns:
        The signal that ended it before its last step, on every rank; else None.

    Raises:
        RolloutError, ConfigError: the input can't be used; on every rank.
    """
    with together(ValueError, OSError):
        read = run_reader(run, rollouts)
        count = sum(1 for _ in read())
        steps = -(-count // run.data.groups_per_step) if steps is None else steps
        check_trainable(run, steps)
        if dist.get_rank() == 0:
            _prepare_output(output)
    trainer = Trainer(run, steps, device)
    groups = itertools.chain.from_iterable(read() for _ in itertools.count())
    batches = _batches(groups, run.data.groups_per_step, count)
    log = (output / "metrics.jsonl").open("w", encoding="utf-8") if dist.get_rank() == 0 else None
    ended_by = None
    with StopSignal(device) as stop:
        while trainer.steps_done < steps and (ended_by := stop.agreed()) is None:
            with together(ValueError, OSError):
                batch = next(batches)
            try:
                metrics = {"step": trainer.steps_done + 1, **trainer.step(batch)}
            except (NonFiniteGradientError, PeerError):  # on all ranks together
                trainer.save(output / "weights")
                raise
            if log is not None:
                log.write(json.dumps(metrics) + "\n")
                log.flush()
                print(_line(metrics, steps), flush=True)
        trainer.save(output / "weights")
    if log is not None:
        log.close()
        ended = (
            "" if ended_by is None else f"{_signal_name(ended_by)} ended it after step {trainer.steps_done}/{steps}; "
        )
        print(f"{ended}wrote {output}/metrics.jsonl and {output}/weights", flush=True)
    return ended_by


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _prepare_output(output: Path) -> None:
    """Makes the folders of a run; ConfigError where another run is there, or nothing can be written."""
    try:
        if (output / "metrics.jsonl").exists():
            raise ConfigError(f"--output {output}: a run's metrics.jsonl is there already; name another folder")
        (output / "weights").mkdir(parents=True, exist_ok=True)
        probe = output / "weights" / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output {output}: can't be written: {error.strerror}") from error


def _batches(groups: Iterator[RolloutGroup], size: int, count: int) -> Iterator[list[RolloutGroup]]:
    """Batches of `size` groups; the last one of each pass over `count` groups may be smaller."""
    while True:
        for first in range(0, count, size):
            yield list(itertools.islice(groups, min(size, count - first)))


def largest(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """The largest of each value over all ranks, which give the same names."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return dict(zip(values, tensor.tolist(), strict=True))


def _line(metrics: dict[str, Any], steps: int) -> str:
    seconds = metrics["seconds"]
    kl = f"  kl {metrics['kl']:.2e}" if "kl" in metrics else ""
    return (
        f"step {metrics['step']}/{steps}  loss {metrics['loss']:+.5f}  reward {metrics['reward_mean']:.3f}  "
        f"grad norm {metrics['grad_norm']:.3e}{kl}  clipped {metrics.get('clip_fraction', 0.0):.1%}  "
        f"prompt {metrics['prompt_tokens']:,} + response {metrics['response_tokens']:,} tokens  "
        f"{seconds['step']:.1f} s (capture {seconds['capture']:.1f}, replay {seconds['replay']:.1f}, "
        f"prompt backward {seconds['prompt_backward']:.1f})  peak {metrics['peak_bytes'] / 2**20:,.0f} MiB"
    )
