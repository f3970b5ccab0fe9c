"""Lets a stock run choose the positions of sparse attention as our run did, and says where it would not have.

The choice of the best K positions is not continuous: where the K-th and the next index score are equal up to
rounding, two right computations choose differently, and the gradients of that query's attention have nothing to do
with each other. On 4096 tokens in float32 that happens to a few queries. So `compare` runs our schedule first and
notes its choices, then the stock schedule, which takes them and counts where its own choice was another one, and
by how much the scores of the positions in question are apart.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_longstraw.position_choice import IndexQueries, index_scores
from megatron_longstraw.prompt_state import Phase, Segment


class IndexChoices:
    """Choices of one run of our schedule, by layer and sequence; kept on the host.

    `record` and `replay` are values of `Runtime.on_choice`. Each layer sees micro-batches in their order, so the
    order is all that sequences are known by.

    Attributes:
        queries: choices that `replay` saw.
        different: those of them that would have been others.
        largest_gap: the most that index scores of positions that only one of the two chose are apart, relative to
            the query's largest score: rounding, if the choices are right.
    """

    def __init__(self) -> None:
        self.queries = self.different = 0
        self.largest_gap = 0.0
        self._prompt: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self._sequences: dict[int, list[list[tuple[int, np.ndarray]]]] = defaultdict(list)

    def record(self, layer: int, segment: Segment, index: IndexQueries, chosen: Tensor) -> Tensor:
        """Notes the choice [T, K] of a captured chunk or of responses, and returns it."""
        if segment.phase in (Phase.CAPTURE, Phase.RESPONSE):
            # not a tensor, so that it is no part of the measured bytes
            rows = np.array(chosen[: segment.length].cpu())
            if segment.start == 0:
                self._prompt[layer] = []
            if segment.phase is Phase.CAPTURE:
                self._prompt[layer].append((segment.start, rows))
            else:
                for sequence in segment.sequences(len(rows)):
                    self._sequences[layer].append([*self._prompt[layer], (segment.start, rows[sequence])])
        return chosen

    def replay(self, layer: int, segment: Segment, index: IndexQueries, chosen: Tensor) -> Tensor:
        """For a stock sequence the choice that our schedule made for it; any other choice as it is.

        A last layer whose router counts nothing chooses for responses only: for the prompt the choice is stock's own.
        """
        if segment.phase is not Phase.PLAIN:
            return chosen
        taken = chosen.clone()
        for start, rows in self._sequences[layer].pop(0):
            noted = taken[start : start + len(rows)]
            noted.fill_(-1)
            noted[:, : rows.shape[1]] = torch.from_numpy(rows[:, : chosen.shape[1]])
            self._compare(index, chosen, noted, start)
        return taken

    def _compare(self, index: IndexQueries, chosen: Tensor, noted: Tensor, start: int) -> None:
        own = chosen[start : start + len(noted)]
        differs = (own.sort(1).values != noted.sort(1).values).any(1).nonzero()[:, 0]
        self.queries += len(own)
        self.different += len(differs)
        for i in differs.tolist():
            row = start + i
            scores = index_scores(index, slice(row, row + 1), index.keys.T)[0]
            exchanged = torch.tensor(sorted(_set(own[i]) ^ _set(noted[i])), device=scores.device)
            of_exchanged = scores[exchanged]
            gap = of_exchanged.max() - of_exchanged.min()
            largest = scores[: row + 1].abs().max()
            self.largest_gap = max(self.largest_gap, float(gap / largest) if gap else 0.0)


def _set(positions: Tensor) -> set[Any]:
    return {p for p in positions.tolist() if p >= 0}
