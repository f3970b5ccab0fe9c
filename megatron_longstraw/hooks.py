"""What we use of Megatron-Core beyond its documented interface, in one list: what `longstraw doctor` looks for.

A hook is a name in one of Megatron's modules, what it must accept as arguments, and what its instances must have.
Every name that the package imports from Megatron is in the list, and a test keeps it so. The list says whether a
Megatron can be stood upon, not whether it still does the same: that is for the exactness tests.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from typing import Any

TESTED_VERSIONS = ("0.19.2", "0.19.1")
"""Versions of Megatron-Core that the tests ran on. A checkout of tag core_v0.19.0 calls itself 0.19.1; what is used of
it here is as in 0.19.2."""


@dataclass(frozen=True)
class Hook:
    """One thing of Megatron's that the package stands on.

    Args:
        module: below ``megatron.core``.
        name: in the module; dotted for a method. Empty for the module itself.
        use: what for.
        takes: parameters that it must have by name; fields, for a dataclass.
        has: attributes that methods of the class set or read on an instance.
    """

    module: str
    name: str
    use: str
    takes: tuple[str, ...] = ()
    has: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".strip(".")


_SCHEDULE = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"),
    *("forward_only", "first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"),
)
_PARALLEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_EXPERIMENTAL = "models.gpt.experimental_attention_variant_module_specs"
_DELTA_NET = "ssm.gated_delta_net"

HOOKS = (
    # the schedule
    Hook("pipeline_parallel", "get_forward_backward_func", "both calls of a group"),
    Hook("pipeline_parallel.schedules", "forward_backward_no_pipelining", "a call at pp 1", _SCHEDULE),
    Hook(
        "pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving", "a call at pp > 1", _SCHEDULE
    ),
    Hook("pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving", "a call at vpp", _SCHEDULE),
    Hook("utils", "get_model_config", "settings of a host's model"),
    Hook("utils", "get_attr_wrapped_model", "the runtime inside wrapped models"),
    Hook("process_groups_config", "MultiModuleProcessGroupCollection", "refused in a host's call"),
    Hook("process_groups_config", "ProcessGroupCollection", "a host's groups are to be parallel_state's"),
    Hook("process_groups_config", "ProcessGroupCollection.use_mpu_process_groups", "the same", ("required_pgs",)),
    Hook("package_info", "__shortversion__", "the version"),
    # layout
    Hook("parallel_state", "", "ranks and groups"),
    Hook(
        "parallel_state",
        "initialize_model_parallel",
        "layout",
        (*_PARALLEL_SIZES, "expert_tensor_parallel_size", "distributed_timeout_minutes", "create_gloo_process_groups"),
    ),
    Hook("parallel_state", "is_initialized", "a host's groups are to be parallel_state's"),
    Hook("parallel_state", "destroy_model_parallel", "a layout in place of another"),
    Hook("parallel_state", "is_pipeline_first_stage", "which chunk embeds", ("ignore_virtual", "vp_stage")),
    Hook("parallel_state", "is_pipeline_last_stage", "which chunk has the head", ("ignore_virtual", "vp_stage")),
    Hook("parallel_state", "get_expert_data_parallel_rank", "who saves experts"),
    Hook("parallel_state", "get_expert_model_parallel_rank", "which experts are here"),
    Hook("parallel_state", "get_expert_model_parallel_world_size", "which experts are here"),
    Hook("parallel_state", "get_global_memory_buffer", "measuring peak bytes of a run alone"),
    Hook("tensor_parallel", "", "mappings"),
    Hook("tensor_parallel", "gather_from_sequence_parallel_region", "the log-prob head", ("group",)),
    Hook("tensor_parallel", "copy_to_tensor_model_parallel_region", "the log-prob head", ("group",)),
    Hook("tensor_parallel.layers", "ColumnParallelLinear", "a linear layer behind a norm"),
    Hook("tensor_parallel.layers", "_grad_accum_fusion_available", "gradient_accumulation_fusion of local layers"),
    Hook("tensor_parallel.random", "", "random state"),
    Hook("tensor_parallel.random", "model_parallel_cuda_manual_seed", "random state", ("force_reset_rng",)),
    # CPU ranks
    Hook("jit", "", "CPU ranks"),
    Hook("jit", "disable_jit_fuser", "CPU ranks"),
    Hook("tensor_parallel.random", "_get_cuda_rng_state", "CPU ranks"),
    Hook("tensor_parallel.random", "_set_cuda_rng_state", "CPU ranks"),
    # settings
    Hook(
        "transformer.transformer_config",
        "TransformerConfig",
        "settings",
        (
            *("variable_seq_lengths", "calculate_per_token_loss", "perform_initialization", "batch_p2p_comm"),
            *("deallocate_pipeline_outputs", "pipeline_model_parallel_layout", "finalize_model_grads_func"),
            "deterministic_mode",
        ),
    ),
    Hook("transformer.mlp", "MLP", "which layers of a host's model can be adopted"),
    Hook("transformer.transformer_config", "MLATransformerConfig", "settings", ("dsa_indexer_topk_freq", "rope_type")),
    # layers of every architecture
    Hook("models.gpt", "GPTModel", "the model", ("vp_stage", "rotary_percent", "transformer_layer_spec")),
    Hook("models.gpt", "GPTModel.forward", "the log-prob head", ("output_processor", "output_processor_context")),
    Hook("models.gpt", "GPTModel._postprocess", "no head for prompt chunks", ("hidden_states",)),
    Hook("transformer.transformer_layer", "TransformerLayer", "layers in a phase", (), ("mlp_norm_manager",)),
    Hook("transformer.transformer_layer", "TransformerLayer.forward", "layers in a phase", ("hidden_states",)),
    Hook("transformer.transformer_layer", "TransformerLayer._forward_attention", "the last layer", ("hidden_states",)),
    Hook("transformer.transformer_layer", "TransformerLayerSubmodules", "layers", ("self_attention", "mlp_bda")),
    Hook("transformer.transformer_layer", "get_transformer_layer_offset", "numbers of layers", ("vp_stage",)),
    Hook("transformer.transformer_block", "TransformerBlockSubmodules", "the model", ("layer_specs", "layer_norm")),
    Hook("transformer.transformer_block", "get_num_layers_to_build", "the model", ("vp_stage",)),
    Hook("models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding", "positions"),
    Hook("models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.get_emb", "positions", ("offset",)),
    Hook("models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding.get_rotary_seq_len", "positions"),
    Hook("models.backends", "BackendSpecProvider", "layer modules"),
    Hook("models.backends", "LocalSpecProvider", "layer modules without Transformer Engine"),
    Hook("models.backends", "BackendSpecProvider.fuse_layernorm_and_linear", "layer modules"),
    Hook("models.backends", "BackendSpecProvider.column_parallel_layer_norm_linear", "layer modules"),
    Hook("extensions.transformer_engine", "HAVE_TE", "whether Transformer Engine imports"),
    Hook("extensions.transformer_engine_spec_provider", "TESpecProvider", "layer modules of Transformer Engine"),
    Hook("models.gpt.gpt_layer_specs", "get_mlp_module_spec_for_backend", "dense MLPs", ("backend",)),
    Hook("fusions.fused_bias_dropout", "get_bias_dropout_add", "residuals"),
    Hook("transformer.identity_op", "IdentityOp", "norms inside linear layers"),
    Hook("transformer.module", "MegatronModule", "core attention"),
    Hook("transformer.module", "Float16Module", "bfloat16"),
    Hook("transformer.enums", "AttnMaskType", "causal attention"),
    Hook("transformer.spec_utils", "ModuleSpec", "layers", ("module", "params", "submodules")),
    # grouped-query attention
    Hook("transformer.attention", "SelfAttention", "attention", (), ("core_attention", "world_size")),
    Hook("transformer.attention", "SelfAttentionSubmodules", "attention", ("core_attention", "q_layernorm")),
    Hook("transformer.dot_product_attention", "DotProductAttention", "compare --stock-attention megatron"),
    # glm52
    Hook("transformer.experimental_attention_variant.absorbed_mla", "", "latent attention"),
    Hook("transformer.experimental_attention_variant.absorbed_mla", "TELinear", "duplicated down-projections"),
    Hook(
        "transformer.experimental_attention_variant.dsa",
        "DSAttention",
        "sparse attention",
        (),
        ("indexer", "source_layer", "index_topk", "softmax_scale"),
    ),
    Hook("transformer.experimental_attention_variant.dsa", "DSAttention.forward", "sparse attention", ("up_v_weight",)),
    Hook("transformer.experimental_attention_variant.dsa", "DSAIndexer.forward_before_topk", "the index", ("x", "qr")),
    Hook(_EXPERIMENTAL, "get_dsa_module_spec_for_backend", "latent attention"),
    Hook(_EXPERIMENTAL, "get_moe_layer_pattern", "which layers have experts"),
    Hook("models.gpt.moe_module_specs", "get_moe_module_spec_for_backend", "experts", ("backend", "moe_grouped_gemm")),
    Hook("transformer.experimental_attention_variant.dsa", "hadamard_transform", "dsa_indexer_rotate_activation"),
    Hook("transformer.moe.moe_utils", "fused_topk_with_score_function", "moe_router_fusion"),
    Hook("transformer.moe.moe_layer", "MoELayer", "experts", (), ("token_dispatcher", "router")),
    Hook(
        "transformer.moe.router",
        "TopKRouter",
        "token counts",
        (),
        ("enable_expert_bias", "local_tokens_per_expert", "tp_group", "expert_bias"),
    ),
    Hook("transformer.moe.router", "TopKRouter._apply_expert_bias", "token counts", ("routing_map", "padding_mask")),
    # qwen36
    Hook(_EXPERIMENTAL, "get_linear_attention_pattern", "which layers are recurrent"),
    Hook(
        _DELTA_NET,
        "GatedDeltaNet",
        "Gated DeltaNet",
        (),
        (
            *("in_proj_split_sections", "qk_dim_local_tp", "v_dim_local_tp", "feat_dim_split", "conv_kernel_dim"),
            *("gated_delta_rule", "act_fn", "A_log", "dt_bias"),
        ),
    ),
    Hook(_DELTA_NET, "GatedDeltaNetSubmodules", "Gated DeltaNet", ("in_proj", "out_norm", "out_proj")),
    Hook(_DELTA_NET, "GatedDeltaNet._prepare_input_for_gated_delta_rule", "states at chunk boundaries"),
    Hook(_DELTA_NET, "GatedDeltaNet._compute_g_and_beta", "states at chunk boundaries"),
    Hook(_DELTA_NET, "GatedDeltaNet._gated_norm_and_a2a", "states at chunk boundaries"),
    Hook(f"{_DELTA_NET}.common", "", "kernels"),
    Hook(f"{_DELTA_NET}.common", "HAVE_FLA", "whether flash-linear-attention imports"),
    Hook(f"{_DELTA_NET}.common", "l2norm", "torch's delta rule without flash-linear-attention"),
    Hook(f"{_DELTA_NET}.common", "causal_conv1d", "convolution by flash-linear-attention"),
    Hook(
        f"{_DELTA_NET}.common",
        "torch_chunk_gated_delta_rule",
        "delta rule by torch",
        ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    ),
    # training
    Hook(
        "distributed",
        "DistributedDataParallel",
        "gradients",
        ("disable_bucketing",),
        ("buffers", "expert_parallel_buffers"),
    ),
    Hook("distributed", "DistributedDataParallel.zero_grad_buffer", "gradients"),
    Hook("distributed", "DistributedDataParallel.broadcast_params", "the same weights on all ranks"),
    Hook(
        "distributed",
        "DistributedDataParallelConfig",
        "gradients",
        ("grad_reduce_in_fp32", "overlap_grad_reduce", "use_distributed_optimizer"),
    ),
    Hook("distributed", "finalize_model_grads", "one reduction a step", ("pg_collection", "force_all_reduce")),
    Hook("optimizer", "OptimizerConfig", "Adam", ("clip_grad", "params_dtype", "use_distributed_optimizer")),
    Hook("optimizer", "Adam", "which Adam it is"),
    Hook("optimizer", "get_megatron_optimizer", "Adam", ("use_gloo_process_groups",)),
    Hook("optimizer_param_scheduler", "OptimizerParamScheduler", "learning rate", ("lr_decay_steps", "wd_incr_steps")),
)


def missing(hooks: tuple[Hook, ...] = HOOKS) -> dict[str, str]:
    """What the installed Megatron lacks: hook -> what is wrong with it and what it is needed for."""
    problems = [(hook, _problem(hook)) for hook in hooks]
    return {str(hook): f"{problem} (needed for: {hook.use})" for hook, problem in problems if problem is not None}


_ABSENT = object()


def value(module: str, name: str, absent: Any = None) -> Any:
    """What Megatron has by that name; `absent` where it has none, or doesn't import."""
    try:
        found: Any = importlib.import_module(f"megatron.core.{module}")
    except ImportError:
        return absent
    return reduce(lambda owner, part: getattr(owner, part, absent), name.split(".") if name else [], found)


def _problem(hook: Hook) -> str | None:
    found = value(hook.module, hook.name, _ABSENT)  # Megatron has None for what an optional package lacks
    if found is _ABSENT:
        return "is not there"
    if hook.takes:
        lacking = set(hook.takes) - inspect.signature(found).parameters.keys()
        if lacking:
            return f"takes no {', '.join(sorted(lacking))}"
    lacking = set(hook.has) - _attributes(found)
    return f"has no {', '.join(sorted(lacking))}" if lacking else None


def _attributes(found: Any) -> set[str]:
    """Names that the methods of a class set or read on something, and its own; of a module or function, none."""
    names: set[str] = set()
    for cls in getattr(found, "__mro__", ()):
        for name, member in vars(cls).items():
            names.add(name)
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            names.update(() if code is None else code.co_names)
    return names
