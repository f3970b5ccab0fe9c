"""Which splits of layers into pipeline stages IndexShare allows.

A layer that reuses an index needs the layer that computed it in its own stage, so each stage has to start on a
computing layer. As Megatron counts (from 1): the first `offset` layers compute, then every `period`-th.
"""

from collections.abc import Sequence


def index_share_problem(stages: Sequence[int], period: int, offset: int) -> str | None:
    """What is wrong with a split, and which split works; None where nothing is wrong.

    Args:
        stages: layers of each pipeline stage.
        period: Megatron's dsa_indexer_topk_freq.
        offset: Megatron's dsa_indexer_skip_topk_offset.
    """
    layers = sum(stages)
    computing = [n for n in range(layers) if max(n + 1 - max(offset, 1), 0) % period == 0]
    starts = [sum(stages[:stage]) for stage in range(len(stages))]
    wrong = next((start for start in starts if start not in computing), None)
    if wrong is None:
        return None
    split = _nearest_split(computing, layers, len(stages))
    advice = f"set parallel.pipeline_layers: {split}" if split else "use fewer stages"
    return (
        f"starts a stage on layer {wrong + 1}, which reuses the index of an earlier layer "
        f"(dsa_indexer_topk_freq={period}, dsa_indexer_skip_topk_offset={offset}): {advice}"
    )


def _nearest_split(starts: Sequence[int], layers: int, stages: int) -> list[int] | None:
    """The most even split of layers into stages that start at some of `starts` (from 0), if there is one."""
    chosen = [0]
    for stage in range(1, stages):
        later = [start for start in starts if start > chosen[-1]]
        if not later:
            return None
        chosen.append(min(later, key=lambda start: abs(start - layers * stage / stages)))
    return [end - start for start, end in zip(chosen, [*chosen[1:], layers], strict=True)]
