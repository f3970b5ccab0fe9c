"""A wrong configuration gets one error that names file, key, what was got and what is needed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_longstraw.config import ConfigError, RunConfig, load_config, parse_override

ROOT = Path(__file__).resolve().parents[1]
GOOD: dict[str, Any] = {
    "model": {
        "vocab_size": 256,
        "transformer": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2},
    }
}


def _load(tmp_path: Path, *overrides: tuple[str, Any]) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return load_config(path, overrides)


def test_defaults(tmp_path: Path) -> None:
    run = _load(tmp_path)
    assert run.schedule.prompt_gradient == "exact"
    assert run.schedule.recompute and run.schedule.keep_choices
    assert not _load(tmp_path, ("schedule.keep_choices", False)).schedule.keep_choices
    assert run.objective.loss_agg_mode == "token-mean"
    assert not run.parallel.uses_sequence_parallel
    assert _load(tmp_path, ("parallel.tp", 2)).parallel.uses_sequence_parallel


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schedule.promt_chunk", 3, "unknown key schedule.promt_chunk: it can be schedule.prompt_chunk_tokens"),
        ("modle", {}, "unknown key modle: it can be model"),
        ("model.vocab_size", None, "model.vocab_size=None: needs an integer"),
        ("model.vocab_size", "many", "model.vocab_size='many': needs an integer"),
        ("model.vocab_size", True, "model.vocab_size=True: needs an integer"),
        ("model.vocab_size", 0, "model.vocab_size=0: needs an integer >= 1"),
        ("model", 3, "model=3: is a section of settings (model.architecture, model.vocab_size, "),
        ("data", "foo", "data='foo': is a section of settings (data.tokenizer, "),
        ("model.architecture", "rnn", "model.architecture='rnn': needs one of gqa"),
        ("model.transformer.num_layers", 0, "model.transformer.num_layers=0: needs an integer >= 1"),
        ("model.transformer.hidden_dropout", 0.1, "model.transformer.hidden_dropout=0.1 is not supported"),
        ("model.transformer.attention_dropout", 0.1, "model.transformer.attention_dropout=0.1 is not supported"),
        ("model.transformer.recompute_granularity", "full", "use schedule.recompute"),
        ("model.transformer.recompute_method", "block", "use schedule.recompute"),
        ("model.transformer.num_moe_experts", 8, "architecture gqa is dense"),
        ("model.transformer.mtp_num_layers", 1, "multi-token prediction is not built"),
        ("model.transformer.context_parallel_size", 2, "context_parallel_size=2 is not supported"),
        ("model.transformer.sequence_parallel", True, "set parallel.sequence_parallel instead"),
        ("model.transformer.params_dtype", "x", "set dtype instead"),
        ("model.transformer.layernorm_epsilon", "1e-6", "needs a finite number > 0 (YAML wants a dot in 1.0e-6)"),
        ("model.transformer.layernorm_epsilon", 0, "layernorm_epsilon=0: needs a finite number > 0"),
        ("model.transformer.layernorm_epsilon", -1e-6, "layernorm_epsilon=-1e-06: needs a finite number > 0"),
        ("model.transformer.kv_channels", 7, "model.transformer.kv_channels=7: RoPE turns pairs"),
        ("model.transformer.hidden_size", 20, "kv_channels is 5 (by default hidden_size / num_attention_heads)"),
        ("model.rotary_percent", 0.4, "kv_channels is 8 (by default hidden_size / num_attention_heads), of which"),
        ("model.rotary_percent", 0.1, "model.rotary_percent=0.1 are 0: RoPE turns pairs"),
        ("model.transformer.normalization", "rmsnorm", "needs one of RMSNorm, LayerNorm"),
        ("model.transformer.activation_func", [1], "needs one of silu, gelu, relu"),
        ("model.transformer.use_mup", True, "use_mup is not among the settings of Megatron's that architecture gqa"),
        ("model.transformer.variable_seq_lengths", False, "the schedule needs its own value"),
        ("model.transformer.transformer_impl", "local", "set model.backend instead"),
        ("model.transformer.moe_router_topk", 2, "moe_router_topk is not among the settings"),
        ("model.rotary_percent", 1.5, "model.rotary_percent=1.5: needs a number in (0, 1]"),
        ("parallel.tp", 3, "num_attention_heads=4 must be a multiple of parallel.tp=3"),
        ("parallel.tp", 0, "parallel.tp=0: needs an integer >= 1"),
        ("parallel.pp", 3, "num_layers=4 must be a multiple of parallel.pp * vpp = 3"),
        ("parallel.vpp", 2, "parallel.vpp=2 needs parallel.pp > 1"),
        ("parallel.vpp", 1, "parallel.vpp=1: needs an integer >= 2"),
        ("model.transformer.num_query_groups", 0, "num_query_groups=0: needs an integer >= 1"),
        ("model.transformer.ffn_hidden_size", "x", "ffn_hidden_size='x': needs an integer >= 1"),
        ("parallel.ep", 2, "parallel.ep=2 needs experts"),
        ("parallel.sequence_parallel", True, "parallel.sequence_parallel=true needs parallel.tp > 1"),
        ("schedule.prompt_chunk_tokens", 0, "schedule.prompt_chunk_tokens=0: needs an integer >= 1"),
        ("schedule.prompt_gradient", "none", "schedule.prompt_gradient='none': needs one of exact, detached"),
        ("schedule.recompute", 1, "schedule.recompute=1: needs true or false"),
        ("schedule.keep_choices", "some", "schedule.keep_choices='some': needs true or false"),
        ("objective.clip_ratio_low", 1.0, "objective.clip_ratio_low=1.0: needs a number in [0, 1)"),
        ("objective.clip_ratio_c", 0.5, "objective.clip_ratio_c=0.5: needs a number > 1, or null"),
        ("objective.kl_coef", float("nan"), "objective.kl_coef=nan: needs a finite number >= 0"),
        ("objective.loss_agg_mode", "mean", "needs one of token-mean, seq-mean-token-sum, seq-mean-token-mean"),
        ("optimizer.lr", "1e-6", "optimizer.lr='1e-6': needs a number (YAML wants a dot in 1.0e-6)"),
        ("optimizer.min_lr", 1.0, "optimizer.min_lr=1.0: needs at most optimizer.lr=1e-06"),
        ("data.temperature", 0.0, "data.temperature=0.0: needs a finite number > 0"),
        ("data.groups_per_step", 0, "data.groups_per_step=0: needs an integer >= 1"),
        ("dtype", "float16", "dtype='float16': needs one of float32, float64, bfloat16"),
        ("seed", -1, "seed=-1: needs an integer >= 0"),
        ("seed.x", 1, "seed.x: seed is a value (0), not a section"),
    ],
)
def test_bad_values(tmp_path: Path, key: str, value: Any, message: str) -> None:
    overrides = [("seed", 0), (key, value)] if key == "seed.x" else [(key, value)]
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        _load(tmp_path, *overrides)
    over = "" if key == "seed.x" else f" over {tmp_path / 'run.yaml'}"
    assert str(error.value).startswith(f"--set {key}{over}: ")
    assert "\n" not in str(error.value)


EXAMPLES = {"glm52": ROOT / "examples" / "glm52" / "tiny.yaml", "qwen36": ROOT / "examples" / "qwen36" / "tiny.yaml"}


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("glm52", {"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim=7: RoPE turns pairs"),
        ("glm52", {"dsa_indexer_head_dim": 6}, "dsa_indexer_head_dim=6: needs at least qk_pos_emb_head_dim=8"),
        ("glm52", {"dsa_indexer_k_norm_epsilon": 0.0}, "dsa_indexer_k_norm_epsilon=0.0: needs a finite number > 0"),
        ("glm52", {"dsa_indexer_topk": None}, "dsa_indexer_topk is missing: architecture glm52 needs it"),
        ("glm52", {"hidden_size": 3}, "hidden_size=3: needs at least num_attention_heads=4"),
        ("glm52", {"moe_router_topk": 9}, "moe_router_topk=9: needs at most num_moe_experts=8"),
        ("glm52", {"moe_router_num_groups": 2}, "set both, or neither"),
        ("glm52", {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "must divide num_moe_experts=8"),
        ("glm52", {"moe_router_num_groups": 2, "moe_router_group_topk": 4}, "needs at most moe_router_num_groups=2"),
        ("glm52", {"moe_router_num_groups": 8, "moe_router_group_topk": 1}, "moe_router_topk=2: needs 1 to 1 experts"),
        ("glm52", {"moe_layer_freq": [0, 1]}, "moe_layer_freq has 2 entries: needs one for each of 8 layers"),
        ("glm52", {"moe_shared_expert_intermediate_size": 31}, "must be a multiple of parallel.tp=2"),
        ("qwen36", {"linear_attention_freq": [1, 0, 1]}, "linear_attention_freq has 3 entries"),
        ("qwen36", {"kv_channels": 20}, "kv_channels=20, of which model.rotary_percent=0.25 are 5: RoPE turns pairs"),
    ],
)  # fmt: skip
def test_settings_that_megatron_would_stumble_on_late(
    architecture: str, settings: dict[str, Any], message: str
) -> None:
    overrides = [(f"model.transformer.{name}", value) for name, value in settings.items()]
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(EXAMPLES[architecture], overrides)


def test_error_names_what_the_user_wrote(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    with pytest.raises(ConfigError) as error:
        load_config(path, [("dtype", "float32"), ("parallel.tp", 3)], {"dtype": "--dtype", "parallel.tp": "--tp"})
    assert str(error.value).startswith(f"--tp over {path}: ")
    path.write_text(yaml.safe_dump({**GOOD, "seed": -1}))
    with pytest.raises(ConfigError) as error:
        load_config(path, [("dtype", "float32")])
    assert str(error.value).startswith(f"{path}: seed=-1")


def test_contradictions_of_two_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.vpp .* needs parallel\.pp > 2"):
        _load(tmp_path, ("parallel.pp", 2), ("parallel.vpp", 2))
    with pytest.raises(ConfigError, match="must be a multiple of num_query_groups=3"):
        _load(tmp_path, ("model.transformer.num_query_groups", 3))
    with pytest.raises(ConfigError, match=r"parallel\.tp=4 must divide .*num_query_groups=6, or be a multiple"):
        _load(
            tmp_path,
            ("model.transformer.num_attention_heads", 12),
            ("model.transformer.num_query_groups", 6),
            ("parallel.tp", 4),
        )
    with pytest.raises(
        ConfigError, match=r"schedule\.boundary_interval=4 needs recurrent layers, which .* gqa has not"
    ):
        _load(tmp_path, ("schedule.boundary_interval", 4))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=255 must be a multiple of parallel\.tp=2"):
        _load(tmp_path, ("model.vocab_size", 255), ("parallel.tp", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a mapping with a 'model' section, got NoneType"),
        ("- 1", "got list"),
        ("model: [", "can't be read as YAML"),
        ("seed: 1\nmodel: {}\nseed: 2", "key 'seed' stands twice"),
        ("seed: 1", "model is missing"),
        ("seed: 2026-13-01", "can't be read as YAML: month must be in 1..12"),
        ("[" * 2000 + "]" * 2000, "can't be read as YAML: nested too deep"),
        ("data:", "data=None: is a section of settings"),
        ("model: {vocab_size: 8}", "model.transformer.num_layers is missing"),
        (
            "model: {transformer: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}}",
            "model.vocab_size is missing",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load_config(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: can't be read: No such file or directory$"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary"):
        load_config(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.b=3", ("a.b", 3)), ("a=1.0e-6", ("a", 1e-6)), ("a=", ("a", None)), ("a=x=y", ("a", "x=y"))],
)
def test_override(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["a", "=3", "a=[1", "a={b: 1, b: 2}", "a=2026-13-01", "a=" + "[" * 2000])
def test_bad_override(text: str) -> None:
    with pytest.raises(ConfigError, match="--set") as error:
        parse_override(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_are_valid(path: Path) -> None:
    assert load_config(path).model.vocab_size > 0
