"""Sparse attention over a prompt's latents, as core attention of Megatron's absorbed latent attention.

A layer keeps one row a prompt position: the latent and the rotary key (kv_lora_rank + qk_pos_emb_head_dim values),
and, where the layer computes an index, the index key. Latents are the same on all TP ranks, so each rank owns 1/TP of
the rows, in pages, and the owner group is the whole TP group. Its ranks share the tokens of a segment, too: each
chooses positions for its share, and attends there with all heads.

IndexShare: some layers reuse the positions that a layer before them chose. The rows that hold them live with the
micro-batch (`MicroBatch.chosen`), where recomputation finds them, whatever ran since. The choice of a captured chunk is
kept (`schedule.keep_choices`) for the prompt backward, whose inputs are the same.

The indexer's parameters get no gradient: as in Megatron without its KL loss, the index reads detached inputs.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_longstraw.latent_rows import LatentRows
from megatron_longstraw.models.layers import last_layer_counts
from megatron_longstraw.position_choice import IndexQueries, choose_positions
from megatron_longstraw.prompt_state import OwnedRows, Phase, Runtime, Segment
from megatron_longstraw.row_gradients import inject_row_gradients, root_at_rows
from megatron_longstraw.sparse_attention import rows_of_positions, sparse_attention
from megatron_longstraw.token_shares import gather_shares, place, share_of, slice_of_share


class PromptSparseAttention(DSAttention):
    """Megatron's DSAttention over the prompt's owned rows.

    Args:
        runtime: the model's runtime.
        query_block, key_block: schedule.query_block_tokens and schedule.attention_block_tokens of stock sequences.
        plain_attention: what runs a stock sequence: "longstraw" is this module without prompt rows, "megatron" is
            Megatron's own forward (its scores are [heads, tokens, tokens], and the position it takes where index
            scores are equal is not defined: give tiny models 16 index heads or more, so that none are).
        kwargs: DSAttention's own.
    """

    def __init__(
        self,
        *args: Any,
        runtime: Runtime,
        query_block: int,
        key_block: int,
        plain_attention: str = "longstraw",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.runtime, self.query_block, self.key_block = runtime, query_block, key_block
        self.is_last = self.layer_number == self.config.num_layers
        self.output_of_capture = not self.is_last or last_layer_counts(self.config)
        self.megatron_plain = plain_attention == "megatron"
        if self.megatron_plain:
            runtime.plain_is_recomputable = False  # its index would then be another micro-batch's
        self.owners = parallel_state.get_tensor_model_parallel_world_size()
        self.group = parallel_state.get_tensor_model_parallel_group() if self.owners > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        up_v_weight: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of absorbed queries over chosen latents.

        Args:
            query: [T, 1, H, D], absorbed. key: [T, 1, 1, D], latents and rotary keys; on all TP ranks.
            x, qr: [T / TP, 1, hidden] and [T / TP, 1, q_lora_rank], what the index is computed from.
            up_v_weight: [H, v_head_dim, kv_lora_rank].

        Returns:
            [T, 1, H * v_head_dim].
        """
        if packed_seq_params is not None or query.shape[1] != 1 or value is not None or up_v_weight is None:
            raise ValueError(
                "sparse attention takes micro-batches [T, 1, ...], absorbed, without Megatron's packing: got size "
                f"{query.shape[1]}, packing {'on' if packed_seq_params is not None else 'off'}, "
                f"values {'apart' if value is not None else 'absorbed'}"
            )
        stateless = self.runtime.segment.phase in (Phase.PLAIN, Phase.IDLE)
        if self.megatron_plain and self.runtime.segment.phase is Phase.PLAIN:
            assert not self.runtime.micro_batch.is_recomputed
            return super().forward(query, key, None, attention_mask, x, qr, up_v_weight=up_v_weight, **kwargs)
        q, latent = query[:, 0], key[:, 0, 0]
        index = self._index(x, qr) if self._computes_index() else None
        attend = self._attend_alone if stateless or not self.runtime.current_state().length else self._attend
        out = attend(q, latent, index)
        return torch.einsum("thc,hdc->thd", out, up_v_weight).reshape(len(q), 1, -1)

    def _attend_alone(self, q: Tensor, latent: Tensor, index: IndexQueries | None) -> Tensor:
        return self._sparse(q, latent, self._chosen(index, None, len(q)), None)

    def _attend(self, q: Tensor, latent: Tensor, index: IndexQueries | None) -> Tensor:
        segment, rows = self.runtime.segment, self._rows(latent)
        if segment.phase is Phase.PROMPT:
            if not self._chooses_in_backward:
                rows.drop("index_key")  # responses, whose forwards come before, were the last to choose
            if self.is_last:
                return root_at_rows(q, self.config.kv_lora_rank, rows, segment, latent=latent)
            (latent,) = inject_row_gradients(rows, segment, latent=latent)
        if segment.phase is Phase.CAPTURE and not self.output_of_capture:
            self._write(rows, latent, index)
            return q.new_zeros(*q.shape[:2], self.config.kv_lora_rank)
        prompt = LatentRows(rows, segment.start, self.group)
        chosen = self._chosen(index, prompt, len(q))
        if segment.phase is Phase.CAPTURE:
            self._write(rows, latent, index)
        return self._sparse(q, latent, chosen, prompt)

    def _sparse(self, q: Tensor, latent: Tensor, chosen: Tensor, prompt: LatentRows | None) -> Tensor:
        return sparse_attention(
            q,
            latent,
            chosen,
            prompt,
            value_width=self.config.kv_lora_rank,
            scale=self.softmax_scale,
            query_block=self._blocks[0],
            attend=self.runtime.attend_of(self.layer_number),
        )

    def _chosen(self, index: IndexQueries | None, prompt: LatentRows | None, tokens: int) -> Tensor:
        """The rows for this share of a micro-batch: chosen here and now, by capture, or by the layer whose choice this
        layer reuses."""
        runtime, segment, positions = self.runtime, self.runtime.segment, None
        if index is not None:
            positions = self._choose(index, prompt)
        elif segment.phase is Phase.PROMPT and self._keeps_choice and not runtime.micro_batch.is_recomputed:
            positions = runtime.current_state().choices(self.layer_number).take(segment.start)
        chosen = runtime.micro_batch.chosen
        if positions is not None:
            chosen[self.layer_number] = rows_of_positions(positions, prompt, segment.sequences(tokens))
        if self.source_layer not in chosen:
            raise RuntimeError(f"layer {self.layer_number} reuses the index of layer {self.source_layer}: not run yet")
        return chosen[self.source_layer]

    def _choose(self, index: IndexQueries, prompt: LatentRows | None) -> Tensor:
        runtime, segment, group = self.runtime, self.runtime.segment, None if prompt is None else prompt.group
        sequences = segment.sequences(len(index.queries))
        query_block, key_block = self._blocks
        choice = choose_positions(index, prompt, query_block=query_block, key_block=key_block, sequences=sequences)
        if runtime.on_choice is not None:
            whole = runtime.on_choice(self.layer_number, segment, index, gather_shares(choice, group))
            choice = share_of(whole, group).contiguous()
        if segment.phase in (Phase.CAPTURE, Phase.PROMPT):
            choice = _without_padding(choice, segment, group)
        if segment.phase is Phase.CAPTURE and self._keeps_choice:
            padded_end = segment.start + len(index.queries)
            runtime.current_state().choices(self.layer_number).keep(segment.start, padded_end, choice)
        return choice

    @property
    def _blocks(self) -> tuple[int, int]:
        """Queries, and the index keys that they are scored against at once: what the schedule that runs says, and of
        a stock sequence what the model was built with."""
        if self.runtime.state is None:
            return self.query_block, self.key_block
        options = self.runtime.state.options
        return options.query_block_tokens, options.attention_block_tokens

    def _computes_index(self) -> bool:
        """Whether positions are scored here and now, not where an earlier choice is taken or none is wanted."""
        if self.indexer is None or self.runtime.micro_batch.is_recomputed:
            return False
        return self.runtime.segment.phase is not Phase.PROMPT or self._chooses_in_backward

    @property
    def _chooses_in_backward(self) -> bool:
        """Whether the prompt backward chooses anew: where capture's choice was not kept, and one is wanted."""
        return not (self.is_last or self._keeps_choice)

    @property
    def _keeps_choice(self) -> bool:
        """Whether this layer's choice is kept; the last layer's is of no use to a prompt chunk's backward."""
        return self.indexer is not None and not self.is_last and self.runtime.current_state().options.keep_choices

    def _write(self, rows: OwnedRows, latent: Tensor, index: IndexQueries | None) -> None:
        """Keeps a captured chunk's rows."""
        fields = {"latent": latent}
        if index is not None:
            fields["index_key"] = index.keys
        rows.write(self.runtime.segment, **fields)

    @torch.no_grad()
    def _index(self, x: Tensor, qr: Tensor) -> IndexQueries:
        queries, keys, weights = self.indexer.forward_before_topk(x, qr)
        return IndexQueries(
            queries=queries[:, 0],
            weights=weights[:, 0],
            keys=keys[:, 0],
            topk=self.index_topk,
            relu=self.config.dsa_indexer_scoring_relu,
        )

    def _rows(self, latent: Tensor) -> OwnedRows:
        return self.runtime.current_state().rows(
            self.layer_number,
            shapes={"latent": tuple(latent.shape[1:])},
            owner_rank=0 if self.group is None else self.group.rank(),
            owners=self.owners,
            dtype=latent.dtype,
            device=latent.device,
            constants={} if self.indexer is None else {"index_key": (self.config.dsa_indexer_head_dim,)},
        )


def _without_padding(chosen: Tensor, segment: Segment, group: dist.ProcessGroup | None) -> Tensor:
    """The choice of a share of a prompt chunk, no wider than its tokens may need, in which rows of padding choose
    their own position alone: the chunk should flow through attention and experts in the same way, and so with the
    same rounding, whenever it does."""
    rank, size = place(group)
    chosen = chosen[:, : segment.end].contiguous()
    padding = chosen[slice_of_share(slice(0, segment.length), group).stop :]
    padding.fill_(-1)
    last = segment.start + rank + size * len(chosen)
    padding[:, 0] = torch.arange(last - size * len(padding), last, size, device=chosen.device)
    return chosen


def latent_attention(config: Any, backend: BackendSpecProvider, **options: Any) -> ModuleSpec:
    """Spec of Megatron's absorbed latent self-attention with `PromptSparseAttention` and its options in it."""
    spec = get_dsa_module_spec_for_backend(config, backend)
    core_attention = spec.submodules.core_attention
    core_attention.module = PromptSparseAttention
    core_attention.params = options
    return spec
