"""The doctor: every hook of Megatron's is in its list and there, and what keeps a run from starting is told."""

import ast
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

import megatron_longstraw
from megatron_longstraw import hooks
from megatron_longstraw.hooks import HOOKS, Hook, missing
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT

PACKAGE = Path(megatron_longstraw.__file__).parent
GLM52 = str(ROOT / "examples" / "glm52" / "tiny.yaml")
TINY = str(ROOT / "examples" / "qwen36" / "tiny.yaml")


def _imported() -> set[tuple[str, str]]:
    """(module below megatron.core, name) of all that the package imports, inside functions too."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                module = (node.module or "").removeprefix("megatron.core").strip(".")
                found |= {(module, alias.name) for alias in node.names}
    return found


def test_every_import_is_in_the_list() -> None:
    imported = _imported()
    assert ("transformer.transformer_layer", "TransformerLayer") in imported
    names = {(hook.module, hook.name.partition(".")[0]) for hook in HOOKS}
    modules = {hook.module for hook in HOOKS if not hook.name}
    assert {
        (m, name) for m, name in imported if (m, name) not in names and f"{m}.{name}".strip(".") not in modules
    } == set()


def test_no_hook_stands_twice() -> None:
    assert len({str(hook) for hook in HOOKS}) == len(HOOKS)
    assert all(hook.use for hook in HOOKS)


def _doctor(*arguments: str) -> tuple[int, str]:
    """The command in a rank process, which need not be one; its status and all that it wrote."""
    from megatron_longstraw.cli import main

    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        try:
            main(["doctor", *arguments])
        except SystemExit as end:
            return int(end.code or 0), screen.getvalue()
    raise AssertionError("main does not return")


def test_all_hooks_are_there(ranks: Ranks) -> None:
    assert ranks.run(Layout(), missing) == [{}]
    ((status, text),) = ranks.run(Layout(), _doctor)
    assert status == 0
    assert f"{len(HOOKS)} of {len(HOOKS)}" in text
    assert "tested: 0.19.2" in text
    assert text.endswith("no problem found\n")


def test_a_run_that_can_start(ranks: Ranks) -> None:
    ((status, text),) = ranks.run(Layout(), _doctor, "--config", TINY, "--world-size", "4", "--dtype", "float64")
    assert status == 0, text
    assert text.endswith("no problem found: this run can start\n")
    rows = [line.split() for line in text.splitlines()]
    assert ["layers", "local"] in rows
    assert ["delta", "rule", "torch"] in rows
    assert "tp 2 x pp 1 x dp 2, ep 1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "problem: nowhere.yaml: can't be read: No such file"),
        (["--config", TINY, "--set", "schedule.chunk=1"], "problem: --set schedule.chunk over"),
        (["--config", TINY, "--world-size", "3"], "problem: 3 ranks can't hold parallel.tp=2"),
        (["--config", TINY, "--set", "model.backend=transformer_engine"], "transformer_engine can't be used"),
        (["--config", TINY, "--set", "model.transformer.deterministic_mode=false"], "deterministic_mode=False can't"),
        (["--config", TINY, "--set", "model.transformer.gradient_accumulation_fusion=true"], "it needs Apex's"),
        (["--config", GLM52, "--set", "model.transformer.moe_router_fusion=true"], "Transformer Engine 2.6"),
        (["--config", GLM52, "--set", "model.transformer.dsa_indexer_rotate_activation=true"], "fast_hadamard"),
        (["--config", TINY, "--world-size", "4", "--nnodes", "3"], "4 ranks can't be spread over 3 nodes evenly"),
        (["--config", TINY, "--set", "data.tokenizer=/nowhere"], "problem: data.tokenizer='/nowhere'"),
        (["--config", TINY, "--set", "model.weights=/nowhere"], "problem: /nowhere"),
        (["--config", TINY, "--set", "model.vocab_size=100"], "vocab_size=100: data.tokenizer='bytes' has 256"),
    ],
)  # fmt: skip
def test_a_run_that_cannot(ranks: Ranks, arguments: list[str], message: str) -> None:
    ((status, text),) = ranks.run(Layout(), _doctor, *arguments)
    assert status == 1
    assert message in text
    assert "no problem" not in text


def test_every_problem_with_files_is_told(ranks: Ranks) -> None:
    arguments = ["--config", TINY, "--dtype", "float64"]
    missing = ["--set", "data.tokenizer=/no/tokenizer", "--set", "model.weights=/no/weights"]
    ((status, text),) = ranks.run(Layout(), _doctor, *arguments, *missing)
    assert status == 1
    assert "problem: data.tokenizer='/no/tokenizer'" in text and "problem: /no/weights" in text
    assert "float64 (for compare: train takes float32 and bfloat16)" in text


def test_null_is_as_good_as_absent(ranks: Ranks) -> None:
    options = [f"--set=model.transformer.{name}=null" for name in ("moe_router_topk", "kv_lora_rank", "v_head_dim")]
    assert ranks.run(Layout(), _settings_of, options, ("moe_router_topk", "kv_lora_rank")) == [(2, 512)]


def _settings_of(options: list[str], names: tuple[str, ...]) -> tuple[Any, ...]:
    from megatron_longstraw.cli import load_run, make_parser
    from megatron_longstraw.models import transformer_config

    config = transformer_config(load_run(make_parser().parse_args(["doctor", "--config", GLM52, *options])))
    return tuple(getattr(config, name) for name in names)


@pytest.mark.parametrize("option", ["--tp", "--world-size", "--nnodes"])
def test_settings_need_a_file(ranks: Ranks, option: str) -> None:
    ((status, text),) = ranks.run(Layout(), _doctor, option, "2")
    assert status == 2
    assert option == "--tp" or option in text
    assert "name the file" in text


def _with_four_gpus(*arguments: str) -> tuple[int, str]:
    """As if torch saw four GPUs; what is counted is all that changes."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        from megatron_longstraw import doctor

        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(doctor, "check_run", lambda run, ranks: {"layers": "local"})
        return _doctor(*arguments)


def test_too_few_gpus(ranks: Ranks) -> None:
    ((status, text),) = ranks.run(Layout(), _with_four_gpus, "--config", TINY, "--world-size", "8")
    assert status == 1
    assert "problem: 8 ranks on 1 node need 8 GPUs on each: 4 are visible here" in text
    ((status, text),) = ranks.run(Layout(), _with_four_gpus, "--config", TINY, "--world-size", "8", "--nnodes", "2")
    assert status == 0, text


def _without(module: str, owner: str, name: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(hooks.value(module, owner), name)
        return _doctor("--config", TINY)


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("transformer.transformer_layer", "TransformerLayer", "_forward_attention"),
        ("models.gpt", "GPTModel", "_postprocess"),
        ("ssm.gated_delta_net.common", "_GDNBase", "_compute_g_and_beta"),
        ("ssm.gated_delta_net.common", "", "HAVE_FLA"),
        ("extensions.transformer_engine", "", "HAVE_TE"),
    ],
)
def test_a_missing_hook_is_named(ranks: Ranks, module: str, owner: str, name: str) -> None:
    ((status, text),) = ranks.run(Layout(), _without, module, owner, name)
    assert status == 1
    (problem,) = [line for line in text.splitlines() if line.startswith("problem: Megatron-Core 0.19.2: ")]
    assert f"{name} is not there (needed for: " in problem
    assert f"{len(HOOKS) - 1} of {len(HOOKS)}" in text


def _changed() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        gpt: Any = hooks.value("models.gpt", "GPTModel")
        patch.setattr(gpt, "forward", lambda self, input_ids: None)
        layer = Hook("transformer.transformer_layer", "TransformerLayer", "a test", (), ("no_such_thing",))
        return missing((*HOOKS, layer))


def test_arguments_and_attributes_that_are_gone(ranks: Ranks) -> None:
    assert ranks.run(Layout(), _changed) == [
        {
            "models.gpt.GPTModel.forward": "takes no output_processor, output_processor_context "
            "(needed for: the log-prob head)",
            "transformer.transformer_layer.TransformerLayer": "has no no_such_thing (needed for: a test)",
        }
    ]
