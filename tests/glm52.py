"""A tiny GLM-5.2 and groups for it, small enough for four ranks on two cores."""

from dataclasses import replace
from typing import Any

import numpy as np

from megatron_longstraw.config import ModelConfig, ParallelConfig, RunConfig, ScheduleConfig
from megatron_longstraw.rollouts import RolloutGroup
from tests.exactness import group, response
from tests.ranks import Layout

# five layers: 1, 2, 3 compute an index, 4 and 5 reuse that of 3; 1 and 2 are dense
TINY_GLM = ModelConfig(
    architecture="glm52",
    vocab_size=256,
    rotary_base=8000000,
    transformer={
        "num_layers": 5,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": [0, 0, 1, 1, 1],
        "moe_router_bias_update_rate": 1e-3,
        "dsa_indexer_n_heads": 16,  # fewer give exact ties, where Megatron's choice is not defined
        "dsa_indexer_head_dim": 12,
        "dsa_indexer_topk": 8,
        "init_method_std": 0.1,
    },
)
# sizes that divide nothing
UNEVEN = ScheduleConfig(
    prompt_chunk_tokens=24, page_tokens=5, attention_block_tokens=13, query_block_tokens=40, log_prob_block_tokens=5
)
STAGES = {1: None, 2: (2, 3)}
LAST_LAYER_CHOOSES = {"num_layers": 7, "moe_layer_freq": [0] * 6 + [1]}
"""Of `tiny_glm`: settings with which the last layer, the only one with experts, computes an index."""


def tiny_glm(layout: Layout, dtype: str = "float64", **transformer: Any) -> RunConfig:
    stages = STAGES[layout.pp]
    return RunConfig(
        model=replace(TINY_GLM, transformer={**TINY_GLM.transformer, **transformer}),
        parallel=ParallelConfig(tp=layout.tp, pp=layout.pp, ep=layout.ep, pipeline_layers=stages),
        schedule=UNEVEN,
        dtype=dtype,
    )


def glm_groups() -> list[RolloutGroup]:
    """Several prompt chunks, one token, one chunk and one; an uneven number, with uneven numbers of responses."""
    g = np.random.default_rng(1)
    return [
        group("uneven chunks", 67, response(g, 5), response(g, 1), response(g, 0), response(g, 10), temperature=0.7),
        group("one token", 1, response(g, 3, [1, 0, 1])),
        group("one chunk and one", 26, response(g, 6, [1, 0, 0, 0, 0, 0]), response(g, 4)),
    ]
