"""The run configuration: one YAML file, frozen dataclasses, every value checked before a rank does work.

Nothing here imports torch or Megatron, so a wrong file is refused in milliseconds. Megatron's own settings
are written under ``model.transformer`` by their names in ``TransformerConfig``; the ones that the schedule
can't honour are refused here by name (`check_transformer_settings`), also when a host's config brings them.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_longstraw import megatron_settings
from megatron_longstraw.pipeline_split import index_share_problem
from megatron_longstraw.unique_yaml import NotYamlError, read_yaml

Dtype = Literal["float32", "float64", "bfloat16"]
PromptGradient = Literal["exact", "detached"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class ConfigError(ValueError):
    """A setting that can't be used: names the file and the key, what was got, and what is needed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    architecture: Literal["gqa", "glm52", "qwen36"] = "gqa"
    """Which builder of megatron_longstraw.models: "gqa" is a dense decoder with grouped-query attention; "glm52" has
    latent attention over positions that an index chooses, and mixture of experts; "qwen36" has Gated DeltaNet layers
    and, every fourth, gated grouped-query attention."""
    vocab_size: int
    """Rows of the embedding; a multiple of parallel.tp."""
    rotary_base: int = 10000
    """RoPE theta."""
    rotary_percent: float = 1.0
    """Share of each head that RoPE turns."""
    tie_embeddings: bool = False
    """Use the embedding as the output layer too."""
    backend: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer modules: Transformer Engine's where they import ("auto"), or Megatron's local ones."""
    weights: str | None = None
    """A HuggingFace folder (safetensors) to start from; by default weights are drawn from the seed."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, by their own names."""

    def __post_init__(self) -> None:
        _at_least("model.vocab_size", self.vocab_size, 1)
        _at_least("model.rotary_base", self.rotary_base, 1)
        _check("model.rotary_percent", self.rotary_percent, 0 < self.rotary_percent <= 1, "a number in (0, 1]")
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if name not in self.transformer:
                raise ConfigError(f"model.transformer.{name} is missing: Megatron's TransformerConfig needs it")
            _positive_integer(f"model.transformer.{name}", self.transformer[name])
        check_transformer_settings(self.transformer, "model.transformer.", self.architecture)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is laid over the ranks; what is left of the world is data parallel."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int | None = None
    """Model chunks per pipeline stage (interleaved schedule); needs pp > 1."""
    ep: int = 1
    """Expert parallel size; needs a mixture-of-experts model."""
    pipeline_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage (pp of them, or pp * vpp in the model's order); by default all have the same."""
    sequence_parallel: bool | None = None
    """Split activations between layers over TP ranks; by default on where tp > 1."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        if self.vpp is not None:
            _at_least("parallel.vpp", self.vpp, 2)
            if self.pp == 1:
                raise ConfigError(f"parallel.vpp={self.vpp} needs parallel.pp > 1: got pp=1")
            if self.pp == 2:
                raise ConfigError("parallel.vpp with variable lengths needs parallel.pp > 2 in Megatron: got pp=2")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("parallel.sequence_parallel=true needs parallel.tp > 1: got tp=1")
        if self.pipeline_layers is not None:
            stages = self.pipeline_layers
            _check("parallel.pipeline_layers", list(stages), len(stages) == self.stages, f"{self.stages} numbers")
            _check("parallel.pipeline_layers", list(stages), min(stages) >= 1, "a layer or more in each stage")
            if self.pp == 1:
                raise ConfigError("parallel.pipeline_layers needs parallel.pp > 1: got pp=1")

    @property
    def stages(self) -> int:
        """Pipeline stages, counting virtual ones."""
        return self.pp * (self.vpp or 1)

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How a group is run: capture the prompt, replay the responses, prompt backward."""

    prompt_chunk_tokens: int = 4096
    """Prompt tokens that flow through the layers at once."""
    prompt_gradient: PromptGradient = "exact"
    """"exact": the gradient of the loss. "detached": the prompt is a constant; cheaper, and not that gradient."""
    page_tokens: int = 256
    """Positions in a page; pages are dealt round-robin over the ranks of an owner group."""
    boundary_interval: int = 1
    """Recurrent layers keep their state at every this-many-th prompt chunk, and run the chunks between forward once
    more before the prompt backward; 1 keeps all. Architectures without such layers take only 1."""
    pack_tokens: int = 0
    """Responses share a micro-batch, one behind the other, as long as together they have at most this many tokens; a
    longer one has its own, and at 0 each has. A pack takes the memory of a prompt chunk of as many tokens, and that of
    the head. With Gated DeltaNet layers, whose rule pads, a response counts as a multiple of 64 tokens. Behind a host's
    own forward step (drop-in, patches) only 0 works."""
    recompute: bool = True
    """Recompute each layer in backward, so that a micro-batch keeps one input per layer. One of at most
    1 / (2 x num_layers) of the tokens of the group's longest (in exact mode prompt chunks count) is not recomputed;
    in a pipeline, and where data-parallel ranks share experts, all are."""
    keep_attention: bool = True
    """A recomputed layer keeps its attention's output, so that the rest alone is computed again: heads x head_dim
    numbers a token over TP, of GLM-5.2 heads x kv_lora_rank. Without `recompute` it means nothing."""
    keep_choices: bool = True
    """The positions that sparse attention chose for prompt tokens are kept until the prompt backward, which else
    chooses them anew, in time quadratic in the prompt. They take dsa_indexer_topk x 2 bytes a prompt token and layer
    that computes an index, over TP (GLM-5.2: 4 KiB / TP), and 4 bytes for each 65,536 tokens before it. Where
    "detached", or nothing is chosen, none are kept."""
    state_gradient_dtype: Literal["float32", "model"] = "float32"
    """Precision in which dL/d(prompt state) is summed over responses; "model" is the model's own."""
    attention_block_tokens: int = 65536
    """Owned prompt rows that one attention call reads, or index keys that queries are scored against at once (a page
    of each TP rank at least); bounds the workspace."""
    query_block_tokens: int = 128
    """Queries of sparse attention whose index scores and chosen rows exist at once; bounds its workspace (GLM-5.2: 1.2
    GiB in backward), beside which one layer's rows of the whole prompt exist, in backward with float32 gradients."""
    log_prob_block_tokens: int = 1024
    """Tokens whose [tokens, vocabulary] logits exist at once."""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():  # made by hand, it has passed no reader
            _typed(f"schedule.{name}", getattr(self, name), hint)
        for name in (
            "prompt_chunk_tokens",
            "page_tokens",
            "boundary_interval",
            "attention_block_tokens",
            "query_block_tokens",
            "log_prob_block_tokens",
        ):
            _at_least(f"schedule.{name}", getattr(self, name), 1)
        _at_least("schedule.pack_tokens", self.pack_tokens, 0)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """GRPO (arXiv 2402.03300) with the clips of DAPO (2503.14476) and dual-clip PPO (1912.09729)."""

    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    clip_ratio_c: float | None = 3.0
    """Dual clip: where the advantage is negative, the loss is at most -this * advantage; null turns it off."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || reference); above 0 every response needs ref_logprobs."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; at 0 entropy is not computed."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number, over the global batch."""
    mask_truncated: bool = False
    """Give no loss to responses that the rollout file marks as truncated (they keep their reward)."""

    def __post_init__(self) -> None:
        low, high = self.clip_ratio_low, self.clip_ratio_high
        _check("objective.clip_ratio_low", low, 0 <= low < 1, "a number in [0, 1)")
        _check("objective.clip_ratio_high", high, 0 <= high < math.inf, "a number >= 0")
        if self.clip_ratio_c is not None:
            _check("objective.clip_ratio_c", self.clip_ratio_c, self.clip_ratio_c > 1, "a number > 1, or null")
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            _check(f"objective.{name}", value, 0 <= value < math.inf, "a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Megatron's distributed Adam and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr to min_lr over the run's steps."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, 0 <= value < math.inf, "a finite number >= 0")
        _check("optimizer.adam_eps", self.adam_eps, self.adam_eps > 0, "a number > 0")
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, 0 <= value < 1, "a number in [0, 1)")
        _check("optimizer.min_lr", self.min_lr, self.min_lr <= self.lr, f"at most optimizer.lr={self.lr}")
        _at_least("optimizer.lr_warmup_steps", self.lr_warmup_steps, 0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rollouts are read."""

    tokenizer: str = "bytes"
    """"bytes" (UTF-8 bytes are the ids) or the path of a HuggingFace tokenizer.json or of its folder."""
    groups_per_step: int = 1
    """Groups in one optimizer step, over all data-parallel ranks."""
    max_prompt_tokens: int | None = None
    """Longer prompts keep their last this many tokens."""
    temperature: float = 1.0
    """Sampling temperature of groups that don't give their own."""

    def __post_init__(self) -> None:
        _at_least("data.groups_per_step", self.groups_per_step, 1)
        if self.max_prompt_tokens is not None:
            _at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        _check("data.temperature", self.temperature, 0 < self.temperature < math.inf, "a finite number > 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dtype: Dtype = "bfloat16"
    """Dtype of parameters and activations."""
    seed: int = 0
    """Seed of the initial weights, which don't depend on the layout."""

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        tp, heads = self.parallel.tp, self.model.transformer["num_attention_heads"]
        kv_heads = self.model.transformer.get("num_query_groups")
        kv_heads = heads if kv_heads is None else kv_heads
        _positive_integer("model.transformer.num_query_groups", kv_heads)
        if heads % kv_heads:
            raise ConfigError(
                f"model.transformer.num_attention_heads={heads} must be a multiple of num_query_groups={kv_heads}"
            )
        if heads % tp:
            raise ConfigError(f"model.transformer.num_attention_heads={heads} must be a multiple of parallel.tp={tp}")
        if kv_heads % tp and tp % kv_heads:
            raise ConfigError(
                f"parallel.tp={tp} must divide model.transformer.num_query_groups={kv_heads}, or be a multiple of it"
            )
        if self.model.vocab_size % tp:
            raise ConfigError(f"model.vocab_size={self.model.vocab_size} must be a multiple of parallel.tp={tp}")
        _check_pipeline_split(self.model.transformer, self.parallel)
        contradiction = megatron_settings.contradiction(
            self.model.transformer, self.model.architecture, self.model.rotary_percent, tp
        )
        if contradiction is not None:
            raise ConfigError(f"model.transformer.{contradiction}")
        if self.model.architecture == "qwen36":
            _check_gated_delta_net(self.model.transformer, self.parallel)
        elif self.schedule.boundary_interval != 1:
            raise ConfigError(
                f"schedule.boundary_interval={self.schedule.boundary_interval} needs recurrent layers, which "
                f"architecture {self.model.architecture} has not: leave it at 1"
            )
        if self.parallel.ep > 1 and not self.model.transformer.get("num_moe_experts"):
            raise ConfigError(
                f"parallel.ep={self.parallel.ep} needs experts: model.transformer.num_moe_experts is not set"
            )

        if self.model.architecture == "glm52":
            _check_index_share_split(self.model.transformer, self.parallel)
            _check_experts(self.model.transformer, self.parallel)
            if tp > 1 and not self.parallel.uses_sequence_parallel:
                raise ConfigError(
                    "parallel.sequence_parallel=false is not supported by architecture glm52 with parallel.tp > 1: "
                    "Megatron's latent attention needs it"
                )


def _check_pipeline_split(transformer: Mapping[str, Any], parallel: ParallelConfig) -> None:
    layers, stages = transformer["num_layers"], parallel.pipeline_layers
    if stages is not None and sum(stages) != layers:
        raise ConfigError(
            f"parallel.pipeline_layers={list(stages)} are {sum(stages)} layers: "
            f"needs model.transformer.num_layers={layers}"
        )
    if stages is None and layers % parallel.stages:
        raise ConfigError(
            f"model.transformer.num_layers={layers} must be a multiple of parallel.pp * vpp = {parallel.stages}, "
            f"or set parallel.pipeline_layers"
        )


def _check_index_share_split(transformer: Mapping[str, Any], parallel: ParallelConfig) -> None:
    layers = transformer["num_layers"]
    stages = parallel.pipeline_layers or (layers // parallel.stages,) * parallel.stages
    period = transformer.get("dsa_indexer_topk_freq", 4)
    offset = transformer.get("dsa_indexer_skip_topk_offset", 3)
    problem = index_share_problem(stages, period, offset)
    if problem is not None:
        raise ConfigError(f"parallel.pipeline_layers={list(stages)} {problem}")


def _check_experts(transformer: Mapping[str, Any], parallel: ParallelConfig) -> None:
    experts = transformer.get("num_moe_experts") or 0
    if experts % parallel.ep:
        raise ConfigError(
            f"model.transformer.num_moe_experts={experts} must be a multiple of parallel.ep={parallel.ep}"
        )
    if transformer.get("moe_token_dispatcher_type") == "allgather" and parallel.tp % parallel.ep:
        raise ConfigError(
            f"model.transformer.moe_token_dispatcher_type=allgather needs a parallel.ep that divides parallel.tp="
            f"{parallel.tp}: got ep={parallel.ep}, and across data-parallel ranks lengths differ; use alltoall"
        )


def check_transformer_settings(settings: Mapping[str, Any], prefix: str = "", architecture: str | None = None) -> None:
    """Refuses Megatron settings under which the schedule would not be exact; `megatron_longstraw.megatron_settings`.

    Args:
        settings: names and values of TransformerConfig fields.
        prefix: what to put before a name in the error.
        architecture: also refuse what this architecture can't have, and all that it isn't known to honour.

    Raises:
        ConfigError: names the setting, its value, and why it is refused.
    """
    for name, value in settings.items():
        problem = megatron_settings.problem(name, value, architecture)
        if problem is not None:
            raise ConfigError(f"{prefix}{name}{problem}")


def _check_gated_delta_net(transformer: Mapping[str, Any], parallel: ParallelConfig) -> None:
    if parallel.tp > 1 and not parallel.uses_sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel=false needs parallel.tp=1 for architecture qwen36: without it Megatron leaves "
            f"a gradient of Gated DeltaNet unreduced over tensor-parallel ranks; got tp={parallel.tp}"
        )
    heads = {}
    for name, default in (("linear_num_key_heads", 16), ("linear_num_value_heads", 32)):  # Megatron's defaults
        heads[name] = transformer.get(name, default)
        _positive_integer(f"model.transformer.{name}", heads[name])
        if heads[name] % parallel.tp:
            raise ConfigError(f"model.transformer.{name}={heads[name]} must be a multiple of parallel.tp={parallel.tp}")
    if heads["linear_num_value_heads"] % heads["linear_num_key_heads"]:
        raise ConfigError(
            f"model.transformer.linear_num_value_heads={heads['linear_num_value_heads']} must be a multiple of "
            f"linear_num_key_heads={heads['linear_num_key_heads']}"
        )


def load_config(
    path: str | Path, overrides: Sequence[tuple[str, Any]] = (), options: Mapping[str, str] | None = None
) -> RunConfig:
    """Reads a run configuration.

    Args:
        path: a YAML file whose sections are the fields of `RunConfig`.
        overrides: pairs (dotted key, value) that replace what the file says, in order.
        options: of overrides that have an option of their own, key -> option (such as "--tp"); others are "--set KEY".

    Raises:
        ConfigError: the file can't be read, or a key is unknown, missing or contradicts another.
    """
    try:
        tree = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}") from error
    except (NotYamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: needs a mapping with a 'model' section, got {type(tree).__name__}")
    sources = {key: (options or {}).get(key, f"--set {key}") for key, _ in overrides}
    for key, value in overrides:
        _override(tree, key, value, sources[key])
    try:
        return _build(RunConfig, tree, "")
    except ConfigError as error:
        text = str(error)
        words = re.findall(r"\w+", text)  # of two settings that contradict each other, the file may have one
        named = [source for key, source in sources.items() if key in text or key.split(".")[-1] in words]
        raise ConfigError(f"{' and '.join(named)} over {path}: {text}" if named else f"{path}: {text}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Splits ``key=value`` of the command line; the value is read as YAML."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {text!r}: needs KEY=VALUE, such as schedule.prompt_chunk_tokens=1024")
    try:
        return key.strip(), read_yaml(value)
    except NotYamlError as error:
        raise ConfigError(f"--set {text[:99]!r}: the value is not YAML: {error}") from error


def _override(tree: dict[str, Any], key: str, value: Any, source: str) -> None:
    *path, last = key.split(".")
    for name in path:
        branch = tree.setdefault(name, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{source}: {name} is a value ({branch!r}), not a section")
        tree = branch
    tree[last] = value


def _build(cls: type[Any], tree: Any, prefix: str) -> Any:
    """One dataclass from a mapping, its sections from sub-mappings."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix[:-1]}={tree!r}: is a section of settings ({', '.join(prefix + f for f in fields)})")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(f"unknown key {name}: it can be {', '.join(prefix + k for k in fields)}")
        hint = hints[key]
        section = dataclasses.is_dataclass(hint)
        values[key] = _build(hint, value, f"{name}.") if section else _typed(name, value, hint)
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ConfigError(f"{prefix}{key} is missing")
    return cls(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value, if its type is the field's; an integer is fine where a float is asked for."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        _check(name, value, value in choices, "one of " + ", ".join(map(str, choices)))
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        return _typed(name, value, next(c for c in choices if c is not type(None)))
    if origin is tuple:
        fine = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        _check(name, value, fine, "a list of integers")
        return tuple(value)
    if origin is Mapping:
        _check(name, value, isinstance(value, Mapping), "a section of settings")
        return dict(value)
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _check(name, value, number, "a number (YAML wants a dot in 1.0e-6)")
        return float(value)
    right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    _check(name, value, right, {"int": "an integer", "str": "a text", "bool": "true or false"}[hint.__name__])
    return value


def _check(name: str, value: Any, fine: bool, needed: str) -> None:
    if not fine:
        raise ConfigError(f"{name}={value!r}: needs {needed}")


def _at_least(name: str, value: int, least: int) -> None:
    _check(name, value, value >= least, f"an integer >= {least}")


def _positive_integer(name: str, value: Any) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _check(name, value, fine, "an integer >= 1")
