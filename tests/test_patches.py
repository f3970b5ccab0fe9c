"""patches/: applied to a copy of the wheel's megatron/training, and Megatron's own `train` on it.

checkout.patch is for files that the wheel lacks: pytest --megatron-checkout PATH checks it on a checkout of tag
core_v0.19.0.
"""

import importlib.util
import os
import resource
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_longstraw.compare import GATES
from megatron_longstraw.config import ConfigError
from megatron_longstraw.float64 import keep_float64
from megatron_longstraw.integrations import megatron_training
from tests.exactness import UNEVEN, tiny_run
from tests.hosts import LENGTH, build_host, edge_samples
from tests.ranks import Layout, Ranks
from tests.torchrun import ROOT, drop_override

APPLY = ROOT / "patches" / "apply.sh"


def _apply(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([APPLY, *map(str, arguments)], text=True, capture_output=True, **options)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _copy_wheel(folder: Path) -> Path:
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent
    shutil.copytree(source, folder / "megatron" / "training", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the wheel's megatron/training within another git repository, under a path with a space."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return _copy_wheel(tmp_path / "my hosts")


def _check_cycle(tree: Path, changed: set[str]) -> None:
    """Patched, patched again, checked, reversed, reversed again."""
    before = _files(tree)
    assert _apply("--check", tree).returncode == 0
    assert _files(tree) == before
    applied = _apply(tree)
    assert applied.returncode == 0, applied.stderr
    after = _files(tree)
    assert {name for name in before if before[name] != after[name]} == changed
    assert after.keys() == before.keys()
    for arguments in (["--check", tree], [tree]):
        assert _apply(*arguments).returncode == 0
        assert _files(tree) == after
    for _ in range(2):
        assert _apply("--reverse", tree).returncode == 0
        assert _files(tree) == before


TRAINING = {"megatron/training/arguments.py", "megatron/training/training.py"}


def test_patches_go_on_once_and_come_off_whole(tree: Path) -> None:
    assert "checkout.patch is left out" in _apply("--check", tree).stdout
    _check_cycle(tree, TRAINING)


def test_what_git_and_umask_say_changes_neither_line_ends_nor_modes(tree: Path) -> None:
    configuration = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.autocrlf", "GIT_CONFIG_VALUE_0": "true"}
    for name, mode in zip(sorted(TRAINING), (0o644, 0o664), strict=True):
        (tree / name).chmod(mode)
    before = _files(tree)
    for flags in ([], ["--reverse"]):
        done = _apply(*flags, tree, env={**os.environ, **configuration}, umask=0o077)
        assert done.returncode == 0, done.stderr
        assert not any(b"\r" in (tree / name).read_bytes() for name in TRAINING)
        assert [(tree / name).stat().st_mode & 0o777 for name in sorted(TRAINING)] == [0o644, 0o664]
    assert _files(tree) == before


@pytest.fixture
def checkout(pytestconfig: pytest.Config) -> Path:
    path = pytestconfig.getoption("--megatron-checkout")
    if path is None:
        pytest.skip("checkout.patch is for files that the wheel lacks: give --megatron-checkout PATH")
    return Path(path)


def test_patches_on_a_checkout(checkout: Path, tmp_path: Path) -> None:
    names = [*TRAINING, "megatron/rl/rl_utils.py", "train_rl.py", "pretrain_gpt.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, tmp_path / name)
    _check_cycle(tmp_path, set(names))
    assert _apply(tmp_path).returncode == 0
    for name in names:
        compile((tmp_path / name).read_text(), name, "exec")


@pytest.mark.parametrize("flags", [[], ["--check"], ["--reverse"]], ids=["apply", "check", "reverse"])
def test_a_tree_that_differs_is_refused_and_untouched(tree: Path, flags: list[str]) -> None:
    file = tree / "megatron" / "training" / "training.py"
    text = file.read_text()
    file.write_text(text.replace("    model = _build_model_wrapper(wrap_with_ddp)\n", "    model = build()\n"))
    before = _files(tree)
    refused = _apply(*flags, tree)
    assert refused.returncode == 1
    line = text[: text.index("    model = _build_model_wrapper(wrap_with_ddp)\n")].count("\n") + 1
    named = [w for w in refused.stderr.split() if w.startswith("megatron/training/training.py:")]
    assert any(0 <= line - int(w.split(":")[1]) <= 3 for w in named), refused.stderr  # the hunk
    assert "training.patch" in refused.stderr and "nothing was changed" in refused.stderr
    assert _files(tree) == before


def test_a_tree_that_is_patched_in_part_is_refused(tree: Path) -> None:
    file = tree / "megatron" / "training" / "arguments.py"
    original = file.read_bytes()
    assert _apply(tree).returncode == 0
    file.write_bytes(original)
    before = _files(tree)
    for flags in ([], ["--reverse"]):
        assert _apply(*flags, tree).returncode == 1
        assert _files(tree) == before


def test_a_tree_with_other_line_ends_is_told_so(tree: Path) -> None:
    file = tree / "megatron" / "training" / "training.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    before = _files(tree)
    refused = _apply(tree)
    assert refused.returncode == 1
    assert "lines of megatron/training/training.py end in CR LF" in refused.stderr
    assert "arguments.py end" not in refused.stderr
    assert _files(tree) == before


@pytest.mark.parametrize("link", ["megatron", "megatron/training", "megatron/training/arguments.py"])
@pytest.mark.parametrize("flags", [[], ["--check"], ["--reverse"]], ids=["apply", "check", "reverse"])
def test_a_symbolic_link_is_told_as_one(tree: Path, link: str, flags: list[str]) -> None:
    (tree / link).rename(tree / "moved")
    (tree / link).symlink_to(tree / "moved")
    before = _files(tree)
    refused = _apply(*flags, tree)
    assert refused.returncode == 3
    assert f"{tree}/{link} is a symbolic link" in refused.stderr and "differs" not in refused.stderr
    assert _files(tree) == before


def test_files_that_cant_be_written_are_told_before_one_is_changed(tree: Path) -> None:
    folder = tree / "megatron" / "training"
    before = _files(tree)
    for path, mode in ((folder / "training.py", 0o444), (folder, 0o555)):
        path.chmod(mode)
        for flags in ([], ["--check"]):
            refused = _apply(*flags, tree, preexec_fn=drop_override)
            assert refused.returncode == 3, refused.stderr
            assert f"{path} can't be written" in refused.stderr and "nothing was changed" in refused.stderr
        assert _apply("--reverse", tree, preexec_fn=drop_override).returncode == 0  # has nothing to do
        path.chmod(mode | 0o200)
    assert _files(tree) == before
    assert _apply(tree, preexec_fn=drop_override).returncode == 0


def test_files_are_put_back_where_writing_fails(tree: Path) -> None:
    """The larger file, which comes last, grows over a limit on file sizes, as on a full disk."""
    (tree / "tmp").mkdir()
    before = _files(tree)
    sizes = {name: len(before[name]) for name in TRAINING}
    assert max(sizes, key=sizes.__getitem__).endswith("training.py")
    limit = max(sizes.values()) + 1

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # SIGXFSZ stays ignored, as Python has it: the write is an error
    environment = {**os.environ, "TMPDIR": str(tree / "tmp")}
    failed = _apply(tree, preexec_fn=limit_files, restore_signals=False, env=environment)
    assert failed.returncode == 3
    assert "they are back as they were" in failed.stderr
    assert _files(tree) == before  # no copies left in tmp either
    assert _apply(tree).returncode == 0


def test_wrong_usage_is_named(tmp_path: Path) -> None:
    for arguments, words in (
        ([], "usage"),
        (["--revert", tmp_path], "usage"),
        (["--revert"], "usage"),
        ([tmp_path / "no"], "is not a folder"),
        ([tmp_path], "has no megatron/training/training.py"),
        (["-"], "- is not a folder"),
    ):
        wrong = _apply(*arguments, cwd=tmp_path, env={**os.environ, "OLDPWD": str(ROOT)})
        assert wrong.returncode == 2 and words in wrong.stderr, wrong.stderr


def test_help_of_the_patches() -> None:
    for flag in ("--help", "-h"):
        shown = _apply(flag)
        assert shown.returncode == 0 and not shown.stderr
        assert "patches/apply.sh [--check | --reverse] CHECKOUT" in shown.stdout and "Exit status" in shown.stdout


@pytest.mark.parametrize("name", ["hosts", "-"])
def test_the_folder_is_the_one_named(tree: Path, tmp_path: Path, name: str) -> None:
    """With CDPATH, cd takes others and prints them; "cd -" goes back; with GIT_DIR, git takes another root."""
    tree.rename(tmp_path / name)
    (tmp_path / "patches").symlink_to(APPLY.parent)
    other = tmp_path / "other"
    (other / name).mkdir(parents=True)
    subprocess.run(["git", "init", "-q", other], check=True)
    elsewhere = {"CDPATH": f"{other}:{tmp_path}", "OLDPWD": str(other), "GIT_DIR": str(other / ".git")}
    environment = {**os.environ, **elsewhere, "GIT_WORK_TREE": str(tmp_path)}
    command = ["patches/apply.sh", "--check", name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "training.patch: absent" in done.stdout


MEGATRON = shlex.split("""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 256
    --micro-batch-size 1 --global-batch-size 8 --train-iters 2 --eval-iters 1 --eval-interval 1000 --seed 7
    --optimizer sgd --lr 0.1 --lr-decay-style constant --clip-grad 0 --weight-decay 0
    --hidden-dropout 0 --attention-dropout 0 --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm --disable-gloo-process-groups
""")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, [], id="tp1"),
        pytest.param(2, ["--tensor-model-parallel-size", "2"], id="tp2", marks=pytest.mark.slow),
        pytest.param(2, ["--pipeline-model-parallel-size", "2"], id="pp2", marks=pytest.mark.slow),
        pytest.param(1, ["--calculate-per-token-loss"], id="per token", marks=pytest.mark.slow),
    ],
)
def test_megatrons_own_train(tmp_path: Path, ranks: int, layout: list[str]) -> None:
    """Two steps and an evaluation by Megatron's train() and evaluate(), with --longstraw and without."""
    tree = _copy_wheel(tmp_path / "tree")
    assert _apply(tree).returncode == 0
    _check_training(tree, tmp_path, ranks, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_pretrain_gpt_of_a_checkout(checkout: Path, tmp_path: Path, layout: str) -> None:
    """The same, by the forward step and loss function of pretrain_gpt.py, which broadcast batches over TP ranks."""
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns("core", ".git", "tests"))
    assert _apply(tree).returncode == 0
    _check_training(tree, tmp_path, 2, [layout, "2", "--pretrain-gpt"])


@pytest.mark.slow
def test_install_on_an_unpatched_tree(tmp_path: Path) -> None:
    """The same by `integrations.megatron.install` and `adopt`, without a patch."""
    _check_training(_copy_wheel(tmp_path / "tree"), tmp_path, 1, [], ["--installed"])


def _environment(tree: Path) -> dict[str, str]:
    """Of a process on the CPU in which the tree's modules are Megatron's."""
    paths = os.pathsep.join([str(tree), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


LONGSTRAW = ["--longstraw", "--longstraw-prompt-chunk", "16", "--longstraw-page", "5"]


def _check_training(
    tree: Path, out: Path, ranks: int, arguments: list[str], longstraw: Sequence[str] = LONGSTRAW
) -> None:
    """Runs tests.megatron_host on a patched tree; its two models must have the same gradients, weights and losses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tests.megatron_host", str(out / "out"), *longstraw]
    run = subprocess.run(
        [*command, *MEGATRON, *arguments],
        cwd=ROOT,
        env=_environment(tree),
        text=True,
        capture_output=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    gate = GATES["float32"]
    for rank in range(ranks):
        result = torch.load(f"{out / 'out'}.{rank}")
        stock, ours = result["stock"], result["longstraw"]
        assert (stock["model"], ours["model"]) == ("GPTModel", "PromptGPTModel")
        assert len(ours["gradients"]) == len(stock["gradients"]) == 2
        for mine, theirs in zip(ours["gradients"], stock["gradients"], strict=True):
            whole = torch.cat([g.flatten() for g in theirs.values()]).norm()
            assert whole > 0
            for name, want in theirs.items():
                apart = (mine[name] - want).norm()
                assert apart <= gate.relative * want.norm() + gate.floor * whole, (name, apart)
        torch.testing.assert_close(ours["weights"], stock["weights"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-6, atol=1e-6)


def _arguments(**changes: Any) -> Namespace:
    fine = {
        "longstraw_prompt_chunk": 16,
        "longstraw_prompt_gradient": "exact",
        "longstraw_page": 5,
        "longstraw_no_recompute": True,
        "longstraw_no_keep_attention": True,
        "longstraw_state_gradient_dtype": "model",
        "micro_batch_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_size": 2,
        **{name: values[0] for name, (values, _) in megatron_training._NEEDED.items()},
    }
    return Namespace(**{**fine, **changes})


def test_arguments_become_options() -> None:
    from megatron_longstraw.integrations.megatron_training import schedule, validate_arguments

    validate_arguments(_arguments())
    options = schedule(_arguments())().keywords["options"]
    assert (options.prompt_chunk_tokens, options.page_tokens, options.prompt_gradient) == (16, 5, "exact")
    assert (options.recompute, options.keep_attention, options.state_gradient_dtype) == (False, False, "model")


NEEDED = [
    ("micro_batch_size", 1, 2),
    ("eval_micro_batch_size", 1, 2),
    ("overlap_grad_reduce", False, True),
    ("overlap_param_gather", False, True),
    ("use_megatron_fsdp", False, True),
    ("use_torch_fsdp2", False, True),
    ("position_embedding_type", "rope", "learned_absolute"),
    ("num_experts", None, 8),
    ("multi_latent_attention", False, True),
    ("experimental_attention_variant", None, "dsa"),
    ("moe_expert_rank_capacity_factor", None, 1.5),
    ("rl_use_sequence_packing", False, True),
    ("sft", False, True),
    ("dataloader_inter_document_masking", False, True),
]
"""Argument, what --longstraw needs of it, and what it refuses."""


def _run_patched(tree: Path, code: str, *arguments: str) -> str:
    """What code prints, in a process of its own, as the patched module is to be Megatron's."""
    assert _apply(tree).returncode == 0
    start = "from megatron_longstraw import cpu_platform, distributed; distributed.quiet(); cpu_platform.install()\n"
    command = [sys.executable, "-c", start + code, *arguments]
    return subprocess.run(command, env=_environment(tree), text=True, capture_output=True, check=True).stdout


def test_arguments_of_a_yaml_file_are_refused(tree: Path, tmp_path: Path) -> None:
    """Megatron takes these in place of all others, and validates them elsewhere."""
    plain, asking = tmp_path / "plain.yaml", tmp_path / "asking.yaml"
    plain.write_text("micro_batch_size: 1\n")
    asking.write_text("micro_batch_size: 1\nlongstraw: true\n")
    code = """if True:
        import sys
        from megatron.training.arguments import parse_args
        flag, plain, asking = sys.argv[1:]
        for arguments in ([flag, "--yaml-cfg", plain], ["--yaml-cfg", asking]):
            sys.argv[1:] = arguments
            try:
                parse_args()
            except ValueError as error:
                print("refused", error)
    """
    lines = _run_patched(tree, code, "--longstraw", str(plain), str(asking)).splitlines()
    assert sum(line.startswith("refused --longstraw is not supported with --yaml-cfg") for line in lines) == 2


def test_needed_arguments_are_those_of_the_patched_parser(tree: Path) -> None:
    assert {name for name, _, _ in NEEDED} == set(megatron_training._NEEDED)
    code = """if True:
        import argparse
        from megatron.training.arguments import add_megatron_arguments
        for action in add_megatron_arguments(argparse.ArgumentParser())._actions:
            print(action.dest, *action.option_strings)
    """
    options = {words[0]: words[1:] for words in map(str.split, _run_patched(tree, code).splitlines()) if words}
    assert "--longstraw" in options["longstraw"]  # the patched one
    for name in megatron_training._NEEDED:
        assert "--" + name.replace("_", "-") in options.get(name, []), name
    for name in ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"):
        assert name in options
    assert "hybrid_context_parallel" in options


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *[({name: value}, f"{name}={fine} (--{name.replace('_', '-')}), got") for name, fine, value in NEEDED],
        ({"gtp_weight_remat_size": 2}, "tensor_parallel_num_weight_shards"),
        ({"expert_gtp_weight_remat_size": 2}, "tensor_parallel_num_weight_shards"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel=True"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"recompute_granularity": "full"}, "recompute_granularity"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"virtual_pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size"),
        ({"longstraw_prompt_chunk": 0}, "prompt_chunk_tokens=0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    from megatron_longstraw.integrations.megatron_training import validate_arguments

    with pytest.raises(ConfigError) as error:
        validate_arguments(_arguments(**changes))
    assert words in str(error.value) and "longstraw" in str(error.value)


def _grpo_loss(current_logprobs: Any, old_logprobs: Any, ref_logprobs: Any, advantages: Any, **settings: Any) -> Any:
    """GRPO per token, with the arguments of Megatron's `calculate_grpo_loss`; the terms are for reports."""
    ratios = (current_logprobs - old_logprobs).exp()
    clipped = ratios.clamp(1 - settings["clamp_eps_lower"], 1 + settings["clamp_eps_upper"])
    advantages = advantages.view(-1, 1)
    difference = ref_logprobs - current_logprobs
    kl = difference.exp() - difference - 1
    loss = -torch.min(ratios * advantages, clipped * advantages) + settings["kl_beta"] * kl
    return loss, kl, ratios, kl, kl, kl


def _rl_loss(loss_mask: Any, kl: Any, ratios: Any, *terms: Any) -> Any:
    output, mask = terms[-1].reshape(-1), loss_mask.reshape(-1)
    tokens = mask.sum()
    total = (output * mask).sum()
    report = torch.stack([total.detach(), tokens, (kl.reshape(-1) * mask).sum().detach()])
    return total, tokens.clamp(min=1).int(), {"lm loss": report}


def _rl_step() -> dict[str, Any]:
    """A step on whole sequences as train_rl.py runs it, from logits, and one by `rl_forward_step`."""
    import functools

    from megatron.core.pipeline_parallel import get_forward_backward_func as megatrons

    import megatron_longstraw
    from megatron_longstraw.integrations.megatron_rl import rl_batches, rl_forward_step

    generator = torch.Generator().manual_seed(0)
    batches = []
    for sample in edge_samples():
        logprobs = [-5.5 + 0.1 * torch.randn(1, LENGTH - 1, generator=generator).double() for _ in range(3)]
        mask = torch.nn.functional.pad(sample["loss_mask"], (1, 0))[:, :-1]  # of the token, not of its prediction
        advantage = torch.randn(1, generator=generator)
        batches.append((sample["tokens"], advantage, logprobs[0], mask, sample["position_ids"], *logprobs[1:]))
    args = Namespace(grpo_clamp_eps_lower=0.1, grpo_clamp_eps_upper=0.2, grpo_kl_beta=0.05)
    args.grpo_entropy_term_weight, args.rl_importance_sampling_truncation_coef = 0.0, None
    args.rl_inference_logprobs_is_correction = False

    def stock_step(iterator: Any, model: Any) -> Any:
        tokens, advantages, old, mask, position_ids, ref, _ = next(iterator)
        logits = model(tokens, position_ids, None)[:, :-1]
        current = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        settings = {"clamp_eps_lower": 0.1, "clamp_eps_upper": 0.2, "kl_beta": 0.05}
        loss, *terms = _grpo_loss(current, old, ref, advantages, **settings)
        return loss, functools.partial(_rl_loss, mask[:, 1:], *terms)

    def our_step(iterator: Any, model: Any) -> Any:
        return rl_forward_step(next(iterator), model, args, _grpo_loss, _rl_loss)

    model = build_host(tiny_run(Layout(), dtype="float64"), adopted=True, per_token=False)

    def run(schedule: Callable[..., Any], step: Any, iterator: Any) -> Any:
        model[0].zero_grad_buffer()
        arguments = {"forward_step_func": step, "data_iterator": iterator, "num_microbatches": len(batches)}
        with keep_float64():
            reports = schedule(**arguments, model=model, seq_length=LENGTH, micro_batch_size=1)
        gradient = torch.cat([p.main_grad.flatten() for p in model[0].parameters()])
        return gradient.clone(), torch.stack([r["lm loss"] for r in reports])

    stock, stock_reports = run(megatrons(), stock_step, iter(batches))
    ours, reports = run(megatron_longstraw.get_forward_backward_func(options=UNEVEN), our_step, rl_batches(batches))
    apart = ((ours - stock).norm() / stock.norm()).item()
    return {"apart": apart, "norm": stock.norm().item(), "reports": (reports - stock_reports).abs().max().item()}


def test_rl_steps_equal_those_of_whole_sequences(ranks: Ranks) -> None:
    (result,) = ranks.run(Layout(), _rl_step)
    assert result["norm"] > 0
    assert result["apart"] <= GATES["float64"].relative
    assert result["reports"] <= 1e-10
