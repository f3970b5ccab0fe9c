"""Which fields of Megatron's TransformerConfig a run may set, and why not the others.

A field is *honoured* (it does what Megatron says, in every phase, on both sides of a comparison), *refused* with a
reason, or set through a key of ours. All others are refused too: the schedule, the core attention or the log-prob
head might ignore them, and a setting that is ignored is worse than one that is missing.
"""

import math
from collections.abc import Mapping
from typing import Any

_INTEGER = "an integer >= 1"
_NUMBER = "a finite number (YAML wants a dot in 1.0e-6)"
_POSITIVE = "a finite number > 0 (YAML wants a dot in 1.0e-6)"
_SWITCH = "true or false"
_PATTERN = "an integer >= 1, or a list of 0 and 1 for each layer"

_SHARED: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"), _INTEGER),
    **dict.fromkeys(("layernorm_epsilon", "init_method_std", "softmax_scale"), _POSITIVE),
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), _SWITCH),
    **dict.fromkeys(("gradient_accumulation_fusion", "persist_layer_norm", "deterministic_mode"), _SWITCH),
    **dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm", "gated_linear_unit", "qk_layernorm"), _SWITCH),
    "normalization": ("RMSNorm", "LayerNorm"),
    "activation_func": ("silu", "gelu", "relu"),
}
_GROUPED_QUERIES: dict[str, Any] = {
    **dict.fromkeys(("num_query_groups", "kv_channels"), _INTEGER),
    **dict.fromkeys(("add_bias_linear", "add_qkv_bias", "attention_output_gate", "rotary_interleaved"), _SWITCH),
    **dict.fromkeys(("layernorm_zero_centered_gamma", "attention_softmax_in_fp32", "apply_rope_fusion"), _SWITCH),
    "qk_l2_norm": _SWITCH,
}
_DELTA_NET: dict[str, Any] = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), _INTEGER),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _INTEGER),
    "linear_attention_freq": _PATTERN,
}
_LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), _INTEGER),
    **dict.fromkeys(("rotary_scaling_factor", "mscale", "mscale_all_dim"), _NUMBER),
    **dict.fromkeys(("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"), _INTEGER),
    **dict.fromkeys(("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"), _INTEGER),
    **dict.fromkeys(("dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation"), _SWITCH),
    "dsa_indexer_scoring_relu": _SWITCH,
    "dsa_indexer_k_norm_epsilon": _POSITIVE,
}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"), _INTEGER),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk"), _INTEGER
    ),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_router_bias_update_rate"), _NUMBER),
    **dict.fromkeys(("moe_grouped_gemm", "moe_router_pre_softmax", "moe_router_enable_expert_bias"), _SWITCH),
    **dict.fromkeys(("moe_permute_fusion", "moe_router_fusion"), _SWITCH),
    "moe_layer_freq": _PATTERN,
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
}
_HONOURED: dict[str, dict[str, Any]] = {
    "gqa": _SHARED | _GROUPED_QUERIES,
    "qwen36": _SHARED | _GROUPED_QUERIES | _DELTA_NET,
    "glm52": _SHARED | _LATENT | _EXPERTS,
}
"""Architecture -> field -> what its value needs to be: a kind, or a tuple of choices."""

_OWNED_BY_US = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "expert_model_parallel_size": "parallel.ep",
    "num_layers_in_first_pipeline_stage": "parallel.pipeline_layers",
    "num_layers_in_last_pipeline_stage": "parallel.pipeline_layers",
    "pipeline_model_parallel_layout": "parallel.pipeline_layers",
    "sequence_parallel": "parallel.sequence_parallel",
    "params_dtype": "dtype",
    "pipeline_dtype": "dtype",
    "bf16": "dtype",
    "fp16": "dtype",
    **dict.fromkeys(
        ("variable_seq_lengths", "calculate_per_token_loss", "perform_initialization", "deallocate_pipeline_outputs"),
        "nothing: the schedule needs its own value",
    ),
    "transformer_impl": "model.backend",
    "rotary_base": "model.rotary_base",
    "rotary_percent": "model.rotary_percent",
}
"""Field -> the key of ours that sets it."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_dropout": ((0,), "dropout would differ between capture, replay and prompt backward"),
    "attention_dropout": ((0,), "dropout would differ between capture, replay and prompt backward"),
    "recompute_granularity": ((), "Megatron would recompute a layer in another phase; use schedule.recompute"),
    "recompute_method": ((), "Megatron would recompute a layer in another phase; use schedule.recompute"),
    "recompute_num_layers": ((), "Megatron would recompute a layer in another phase; use schedule.recompute"),
    "context_parallel_size": ((1,), "prompt rows are owned over the tensor-parallel group, not over CP"),
    "hybrid_context_parallel": ((False,), "prompt rows are owned over the tensor-parallel group, not over CP"),
    **dict.fromkeys(
        ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        ((1,), "(expert_)tensor_parallel_num_weight_shards shards weights over ranks that run other micro-batches"),
    ),
    "mtp_num_layers": ((0,), "multi-token prediction is not built"),
    "window_size": ((), "sliding windows are not built"),
    "softmax_type": (("vanilla",), "attention sinks are not built"),
    "enable_cuda_graph": ((False,), "CUDA graphs would replay a layer in one fixed phase"),
    "external_cuda_graph": ((False,), "CUDA graphs would replay a layer in one fixed phase"),
    "cuda_graph_impl": (("none",), "CUDA graphs would replay a layer in one fixed phase"),
    "fp8": ((), "fp8 is not built"),
    "fp4": ((), "fp4 is not built"),
    "qk_clip": ((False,), "QK clipping reads attention maxima that the core attention doesn't keep"),
    "log_max_attention_logit": ((False,), "the core attention keeps no maxima"),
    "tp_comm_overlap": ((False,), "its buffers have one length, and lengths vary"),
    "defer_embedding_wgrad_compute": ((False,), "it counts micro-batches, of which prompt chunks have no head"),
    "fine_grained_activation_offloading": ((False,), "activation offloading is not built"),
    "cpu_offloading": ((False,), "activation offloading is not built"),
    "overlap_moe_expert_parallel_comm": ((False,), "that schedule splits layers across micro-batches"),
    "no_rope_freq": ((), "layers without RoPE are not tested"),
    "moe_aux_loss_coeff": ((0, 0.0), "balancing losses of prompt tokens are not built; use the expert bias"),
    "moe_z_loss_coeff": ((0, 0.0), "the router's z-loss of prompt tokens is not built"),
    "moe_router_load_balancing_type": (
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),  # these do nothing with moe_aux_loss_coeff=0
        "it balances within a micro-batch, and ours are not those of the stock schedule",
    ),
    "moe_expert_capacity_factor": ((), "token dropping depends on how tokens are cut into micro-batches"),
    "moe_pad_expert_input_to_capacity": ((False,), "token dropping depends on how tokens are cut into micro-batches"),
    "moe_input_jitter_eps": ((), "jitter would differ between capture, replay and prompt backward"),
    "moe_router_force_load_balancing": ((False,), "random routes would differ between capture and prompt backward"),
    "moe_router_force_biased": ((), "random routes would differ between capture and prompt backward"),
    "moe_enable_routing_replay": ((False,), "a prompt token passes a router several times; replay isn't built for it"),
    "dsa_indexer_loss_coeff": ((0, 0.0), "the KL loss that trains the index is not built"),
}
"""Field -> (the values that are fine, why others are not)."""

_REFUSED_BY: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "gqa": {
        "num_moe_experts": ((0,), "architecture gqa is dense"),
        "multi_latent_attention": ((False,), "architecture gqa has keys and values per head"),
        "experimental_attention_variant": ((), "architecture gqa has full attention in every layer"),
    },
    "qwen36": {
        "num_moe_experts": ((0,), "architecture qwen36 is dense"),
        "multi_latent_attention": ((False,), "architecture qwen36 has keys and values per head"),
        "experimental_attention_variant": (("gated_delta_net",), "architecture qwen36 has Gated DeltaNet layers"),
    },
    "glm52": {
        "multi_latent_attention": ((True,), "architecture glm52 has latent attention"),
        "experimental_attention_variant": (("dsa",), "architecture glm52 has sparse attention"),
        "num_query_groups": ((), "latent attention has no groups of queries"),
        "rope_type": (("rope",), "YaRN depends on lengths"),
        "apply_rope_fusion": ((False,), "Megatron has it for YaRN only"),
        "add_bias_linear": ((False,), "Megatron's absorbed latent attention has no biases"),
        "dsa_kernel_backend": (("none",), "its kernels take no prompt rows"),
        "expert_tensor_parallel_size": ((1,), "experts are whole on a rank; use parallel.ep"),
        "moe_shared_expert_overlap": ((False,), "it isn't tested"),
        "moe_latent_size": ((), "it isn't tested"),
    },
}
"""The same, for what one architecture can't have and another may."""


def problem(name: str, value: Any, architecture: str | None) -> str | None:
    """What is wrong with a TransformerConfig field, as what follows its name in an error; None where nothing is.

    Args:
        name: the field.
        value: its value; None is as good as absent.
        architecture: of the run; None for the config of a host, of which only what is refused by name is checked.
    """
    refused = _REFUSED | _REFUSED_BY.get(architecture or "", {})
    if name in refused and value is not None:
        fine, reason = refused[name]
        if value in fine:
            return None
        needed = f"needs {fine[0]}" if fine else "leave it unset"
        return f"={value!r} is not supported ({needed}): {reason}"
    if architecture is None or name in refused:
        return None
    if name in _OWNED_BY_US:
        return f": set {_OWNED_BY_US[name]} instead"
    honoured = _HONOURED[architecture]
    if name not in honoured:
        return (
            f" is not among the settings of Megatron's that architecture {architecture} honours: {', '.join(honoured)}"
        )
    needed = honoured[name]
    if value is None or _fits(value, needed):
        return None
    return f"={value!r}: needs {'one of ' + ', '.join(needed) if isinstance(needed, tuple) else needed}"


def _fits(value: Any, needed: Any) -> bool:
    if isinstance(needed, tuple):
        return value in needed
    if needed == _SWITCH:
        return isinstance(value, bool)
    if isinstance(value, list):
        return needed == _PATTERN and all(v in (0, 1) for v in value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if needed in (_NUMBER, _POSITIVE):
        return number and (needed == _NUMBER or value > 0)
    return number and isinstance(value, int) and value >= 1


def contradiction(settings: Mapping[str, Any], architecture: str, rotary_percent: float, tp: int = 1) -> str | None:
    """What is wrong with settings taken together, each of which `problem` found fine; None where nothing is.

    Megatron finds these when it builds a layer, or in its first forward, and doesn't name the setting.

    Args:
        settings: TransformerConfig fields and their values, as a run gives them.
        architecture: of the run.
        rotary_percent: share of a head that RoPE turns.
        tp: tensor-parallel size.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    problems = [_rope_problem(given, architecture, rotary_percent), _split_problem(given, tp)]
    for name in ("linear_attention_freq", "moe_layer_freq"):
        pattern, layers = given.get(name), given["num_layers"]
        if isinstance(pattern, list) and len(pattern) != layers:
            problems.append(f"{name} has {len(pattern)} entries: needs one for each of {layers} layers")
    if architecture == "glm52":
        problems += [_index_problem(given), _router_problem(given)]
    return next((problem for problem in problems if problem is not None), None)


def _rope_problem(given: Mapping[str, Any], architecture: str, rotary_percent: float) -> str | None:
    """RoPE turns pairs of numbers."""
    name = "qk_pos_emb_head_dim" if architecture == "glm52" else "kv_channels"
    default = 64 if architecture == "glm52" else given["hidden_size"] // given["num_attention_heads"]
    width = given.get(name, default)
    turned = int(width * rotary_percent)
    if turned % 2 == 0 and turned > 0:
        return None
    where = f"={width}" if name in given else f" is {width} (by default hidden_size / num_attention_heads)"
    share = "" if rotary_percent == 1 else f", of which model.rotary_percent={rotary_percent} are {turned}"
    return f"{name}{where}{share}: RoPE turns pairs, and needs an even number >= 2"


def _split_problem(given: Mapping[str, Any], tp: int) -> str | None:
    defaults = {"ffn_hidden_size": 4 * given["hidden_size"]}
    for name in ("ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = given.get(name, defaults.get(name, 0))
        if width % tp:
            return f"{name}={width} must be a multiple of parallel.tp={tp}"
    return None


def _index_problem(given: Mapping[str, Any]) -> str | None:
    for name in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if name not in given:
            return f"{name} is missing: architecture glm52 needs it"
    if given["hidden_size"] < given["num_attention_heads"]:
        return f"hidden_size={given['hidden_size']}: needs at least num_attention_heads={given['num_attention_heads']}"
    width, rotary = given["dsa_indexer_head_dim"], given.get("qk_pos_emb_head_dim", 64)
    if width < rotary:
        return f"dsa_indexer_head_dim={width}: needs at least qk_pos_emb_head_dim={rotary}, as RoPE turns a part of it"
    return None


def _router_problem(given: Mapping[str, Any]) -> str | None:
    experts, topk = given.get("num_moe_experts"), given.get("moe_router_topk", 2)
    if experts is None:
        return None
    if topk > experts:
        return f"moe_router_topk={topk}: needs at most num_moe_experts={experts}"
    groups, group_topk = given.get("moe_router_num_groups"), given.get("moe_router_group_topk")
    if groups is None and group_topk is None:
        return None
    if groups is None or group_topk is None:
        return "moe_router_num_groups and moe_router_group_topk: set both, or neither"
    if experts % groups:
        return f"moe_router_num_groups={groups} must divide num_moe_experts={experts}"
    if group_topk > groups:
        return f"moe_router_group_topk={group_topk}: needs at most moe_router_num_groups={groups}"
    if not group_topk <= topk <= group_topk * (experts // groups):
        return (
            f"moe_router_topk={topk}: needs {group_topk} to {group_topk * (experts // groups)} experts, as "
            f"moe_router_group_topk={group_topk} groups of {experts // groups} are chosen"
        )
    return None
