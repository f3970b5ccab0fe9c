"""What is installed, what a run would use of it, and whether it can run: ``longstraw doctor``.

It starts no ranks and needs no GPU. A configuration is checked as each rank would check it, for any number of ranks.
"""

import importlib
import sys
from collections.abc import Callable
from importlib import metadata

import torch
import torch.distributed as dist

from megatron_longstraw import hooks
from megatron_longstraw.config import ConfigError, ParallelConfig, RunConfig
from megatron_longstraw.distributed import check_world_size
from megatron_longstraw.rollouts import load_tokenizer

Row = tuple[str, str, str]
"""What, what was found, what follows from it."""


def check_run(run: RunConfig, world_size: int) -> dict[str, str]:
    """What every rank checks of a run before it builds anything; needs no process group.

    Returns:
        Which kernels it gets; see `megatron_longstraw.models.chosen_kernels`.

    Raises:
        ConfigError: the ranks can't hold the layout, or Megatron or this machine refuses a setting.
    """
    from megatron_longstraw.models import chosen_kernels

    check_world_size(run.parallel, world_size)
    return chosen_kernels(run)


def doctor(load: Callable[[], RunConfig] | None, world_size: int | None, nodes: int | None) -> int:
    """Prints what is here and what a run would use; returns 1 where something keeps it from running, else 0.

    Args:
        load: reads the run's configuration; None looks at the machine only.
        world_size: ranks of the run; None: as few as its layout takes.
        nodes: machines like this one that the ranks are spread over; None: one, where world_size is given.
    """
    problems: list[str] = []
    sections = {"installed": _installed(), "GPUs": _gpus(), "Megatron-Core": _megatron(problems)}
    if load is not None:
        try:
            sections["this run"] = _run(load(), world_size, nodes, problems)
        except ConfigError as error:
            problems.append(str(error))
    width = max(len(row[0]) for rows in sections.values() for row in rows)
    second = max(len(row[1]) for rows in sections.values() for row in rows if row[2])
    for title, rows in sections.items():
        print(title)
        for what, found, follows in rows:
            print(f"  {what:{width}}  {found:{second}}  {follows}".rstrip())
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print("no problem found" if load is None else "no problem found: this run can start")
    return 1 if problems else 0


def _installed() -> list[Row]:
    have_te = bool(hooks.value("extensions.transformer_engine", "HAVE_TE"))
    have_fla = bool(hooks.value("ssm.gated_delta_net.common", "HAVE_FLA"))
    adam = str(hooks.value("optimizer", "Adam.__module__")).partition(".")[0]
    gpu = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "not in this torch"
    adam = {"transformer_engine": "Transformer Engine's fused", "apex": "Apex's fused"}.get(adam, "torch's")
    backend = "transformer_engine" if have_te and gpu else "local"
    delta_rule = "flash-linear-attention" if have_fla and gpu else "torch"
    te = _package("transformer-engine", None if have_te else "")
    fla = _package("flash-linear-attention", None if have_fla else "")
    return [
        ("Python", ".".join(map(str, sys.version_info[:3])), ""),
        ("torch", torch.__version__, ""),
        ("CUDA", torch.version.cuda or "not in this torch", "" if gpu else "no GPU: ranks run on the CPU, over gloo"),
        ("NCCL", nccl, "ranks talk over it" if gpu else ""),
        ("Transformer Engine", te, f"model.backend=auto: {backend}"),
        ("Apex", _package("apex", "apex.optimizers"), f"Adam: {adam}"),
        ("flash-linear-attention", fla, f"delta rule of qwen36: {delta_rule}"),
        ("FlashMLA", _package("flash-mla", "flash_mla"), "not used: sparse attention of glm52 is torch's"),
    ]


def _package(distribution: str, module: str | None) -> str:
    """A package's version, if it imports. `module`: to try; "" where it is known not to, None where it does."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = ""
    if module:
        try:
            importlib.import_module(module)
        except (ImportError, OSError):  # OSError: a library of CUDA that is not here
            module = ""
    if module == "":
        return f"{version} does not import" if version else "not installed"
    return version or "of unknown version"


def _gpus() -> list[Row]:
    """Each GPU's free memory, from NVML, which starts no CUDA context."""
    import pynvml

    version = metadata.version("nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [("NVML (nvidia-ml-py)", version, str(error))]
    rows = [("NVML (nvidia-ml-py)", version, f"driver {pynvml.nvmlSystemGetDriverVersion()}")]
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        free, total = (f"{n / 2**30:.1f} GiB" for n in (memory.free, memory.total))
        rows.append((f"GPU {index}", pynvml.nvmlDeviceGetName(device), f"{free} of {total} free"))
    pynvml.nvmlShutdown()
    rows.append(("visible to torch", str(torch.cuda.device_count()), ""))
    return rows


def _megatron(problems: list[str]) -> list[Row]:
    version = str(hooks.value("package_info", "__shortversion__"))
    lacking = hooks.missing()
    problems += [f"Megatron-Core {version}: megatron.core.{name} {what}" for name, what in lacking.items()]
    tested = ", ".join(hooks.TESTED_VERSIONS)
    known = f"tested: {tested}" if version in hooks.TESTED_VERSIONS else f"NOT TESTED: tested is {tested}"
    count = len(hooks.HOOKS)
    return [
        ("version", version, known),
        ("hook points", f"{count - len(lacking)} of {count}", "megatron_longstraw/hooks.py"),
    ]


def _run(run: RunConfig, world_size: int | None, nodes: int | None, problems: list[str]) -> list[Row]:
    parallel = run.parallel
    ranks = world_size or _fewest_ranks(parallel)
    only = " (for compare: train takes float32 and bfloat16)" if run.dtype == "float64" else ""
    rows = [
        ("architecture", run.model.architecture, f"{run.model.transformer['num_layers']} layers, {run.dtype}{only}"),
        (
            "ranks",
            str(ranks),
            f"tp {parallel.tp} x pp {parallel.pp} x dp {ranks // (parallel.tp * parallel.pp)}, ep {parallel.ep}"
            + ("" if world_size else " (the fewest)"),
        ),
    ]
    checks: list[Callable[[], None]] = [
        lambda: rows.extend((what, kernel, "") for what, kernel in check_run(run, ranks).items()),
        lambda: _check_gpus(ranks, nodes or 1) if world_size or nodes else None,
        lambda: _check_tokenizer(run),
        lambda: _check_weights(run),
    ]
    if problems:  # without Megatron's hooks nothing of ours imports
        checks = checks[1:]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    return rows


def _fewest_ranks(parallel: ParallelConfig) -> int:
    ranks = parallel.tp * parallel.pp
    return next(ranks * dp for dp in range(1, parallel.ep + 1) if (parallel.tp * dp) % parallel.ep == 0)


def _check_gpus(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise ConfigError(f"{ranks} ranks can't be spread over {nodes} nodes evenly")
    visible = torch.cuda.device_count()
    if torch.cuda.is_available() and visible < ranks // nodes:
        raise ConfigError(
            f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''} need {ranks // nodes} GPUs on each: "
            f"{visible} are visible here"
        )


def check_files(run: RunConfig) -> None:
    """Reads the tokenizer and the heads of the weights' files; ConfigError where they can't be used."""
    _check_tokenizer(run)
    _check_weights(run)


def _check_tokenizer(run: RunConfig) -> None:
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size}: data.tokenizer={run.data.tokenizer!r} has "
            f"{tokenizer.vocab_size} ids; needs as many rows or more"
        )


def _check_weights(run: RunConfig) -> None:
    if run.model.weights is not None:
        from megatron_longstraw.models import weight_map
        from megatron_longstraw.weights import SafetensorsFolder

        weight_map(run)
        SafetensorsFolder(run.model.weights)
