"""Mixture-of-experts layers from Megatron's modules, whose routers count tokens as the stock schedule would.

Aux-loss-free balancing (arXiv 2408.15664) moves each expert's bias by how many tokens of the step it got. Stock
training sees each prompt token once a response; we see it once, or several times with recomputation and prompt
backward. `CountingRouter` counts a token in one of its passes only, and there as often as stock would
(`Segment.multiplicity`), and never counts padding or idle work.

Counts are summed in float32, as Megatron's buffer is: exact while an expert gets fewer than 2^24 tokens a step on
a rank.
"""

import functools
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_longstraw.prompt_state import Phase, Runtime


class CountingRouter(TopKRouter):
    """Megatron's router with `Segment.multiplicity` as the weight of a token in the counts.

    Args:
        runtime: the model's runtime.
        kwargs: TopKRouter's own.
    """

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        micro_batch = self.runtime.micro_batch
        segment = micro_batch.segment
        # capture runs without autograd; any other pass without it is an evaluation, or recomputed later
        counted = segment.phase is Phase.CAPTURE or torch.is_grad_enabled()
        if not self.enable_expert_bias or micro_batch.is_recomputed or not counted or not segment.multiplicity:
            return
        rows = len(routing_map)
        first = rows * self.tp_group.rank() if self.config.sequence_parallel else 0
        mine = routing_map[: min(max(segment.length - first, 0), rows)]  # padding comes last
        with torch.no_grad():
            self.local_tokens_per_expert += mine.sum(0) * segment.multiplicity


class PromptMoELayer(MoELayer):
    """Megatron's layer, without what its token dispatcher keeps of the last forward.

    Maps of tokens and the routing probabilities stay on the dispatcher until the layer's next forward, and with these,
    after a recomputation, the graph of the whole layer up to its router.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dispatcher_constants = [id(x) for x in vars(self.token_dispatcher).values() if isinstance(x, Tensor)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        finally:  # recomputation stops a forward, by an exception, at the last tensor that it needs
            for name, value in vars(self.token_dispatcher).items():
                if isinstance(value, Tensor) and id(value) not in self._dispatcher_constants:
                    setattr(self.token_dispatcher, name, None)


def moe_layer(config: Any, backend: BackendSpecProvider, runtime: Runtime) -> Any:
    """Builder of a mixture-of-experts layer, for a layer's spec."""
    spec = get_moe_module_spec_for_backend(
        backend=backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    submodules = spec.keywords["submodules"]
    submodules.router = functools.partial(CountingRouter, runtime=runtime)
    return functools.partial(PromptMoELayer, submodules=submodules)
