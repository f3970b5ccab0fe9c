"""Sparse attention over owned latents against dense references: choices, outputs and all gradients, at odd sizes."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from megatron_longstraw.latent_rows import LatentRows
from megatron_longstraw.position_choice import IndexQueries, choose_positions
from megatron_longstraw.prompt_state import OwnedRows, Pages, Phase, PromptState, Segment, StateOptions
from megatron_longstraw.row_gradients import inject_row_gradients, root_at_rows
from megatron_longstraw.sparse_attention import rows_of_positions, sparse_attention
from tests.ranks import Layout, Ranks

HEADS, WIDTH, VALUE, INDEX_HEADS, INDEX_WIDTH = 4, 11, 7, 3, 5
SCALE = WIDTH**-0.5


def _dense_choice(index: IndexQueries, keys_SI: torch.Tensor) -> torch.Tensor:
    """What `choose_positions` does: keys of the whole sequence, of which the index queries are the last T."""
    scores = torch.einsum("tni,si->tns", index.queries, keys_SI)
    scores = ((scores.relu() if index.relu else scores) * index.weights[..., None]).sum(1)
    tokens, length = scores.shape
    position = torch.arange(length, device=scores.device)
    scores = scores.masked_fill(position > position[length - tokens :, None], -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True)
    best = order.indices.where(order.values > -math.inf, length)[:, : index.topk].sort(dim=1).values
    return best.where(best < length, -1).int()


def _dense_sparse_attention(
    q_THD: torch.Tensor, rows_SD: torch.Tensor, chosen_TK: torch.Tensor, value_width: int, scale: float
) -> torch.Tensor:
    """What `sparse_attention` does: rows of the whole sequence, with the whole [H, T, S] score matrix."""
    allowed = torch.zeros(len(q_THD), len(rows_SD) + 1, dtype=torch.bool, device=q_THD.device)
    allowed.scatter_(1, chosen_TK.long().where(chosen_TK >= 0, len(rows_SD)), True)
    scores = torch.einsum("thd,sd->hts", q_THD, rows_SD) * scale
    p = scores.masked_fill(~allowed[:, :-1], -math.inf).softmax(-1)
    return torch.einsum("hts,sv->thv", p, rows_SD[:, :value_width])


def _sizes(prompt: int, tokens: int, topk: int, page: int, block: int, query_block: int) -> dict[str, int]:
    sizes = {"prompt": prompt, "tokens": tokens, "topk": topk}
    return {**sizes, "page": page, "block": block, "query_block": query_block}


SIZES = {
    "odd": _sizes(101, 23, 9, 7, 19, 5),
    "one_token": _sizes(53, 1, 4, 8, 64, 128),
    "topk_beyond_all": _sizes(13, 6, 64, 4, 3, 2),
    "topk_beyond_prompt": _sizes(3, 12, 9, 1, 2, 4),
    "short_prompt": _sizes(1, 5, 2, 16, 16, 3),
    "no_prompt": _sizes(0, 21, 6, 8, 8, 8),
    "several_blocks_of_keys": _sizes(37, 16, 9, 2, 11, 2),
    "topk_beyond_a_block_of_keys": _sizes(7, 30, 12, 1, 3, 3),
}


def _for_ranks(sizes: dict[str, int], world: int) -> dict[str, int]:
    """The same with as many tokens as ranks can share evenly."""
    return {**sizes, "tokens": -(-sizes["tokens"] // world) * world}


def _inputs(sizes: dict[str, int], ties: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """With ties, the index is made of small integers, so that many scores are equal."""
    g = torch.Generator().manual_seed(sum(sizes.values()))
    prompt, tokens = sizes["prompt"], sizes["tokens"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def draw_index(*shape: int) -> torch.Tensor:
        return draw(*shape).round() if ties else draw(*shape)

    keys = draw_index(prompt + tokens, INDEX_WIDTH)
    queries, weights = draw_index(tokens, INDEX_HEADS, INDEX_WIDTH), draw_index(tokens, INDEX_HEADS)
    return {
        "index": IndexQueries(queries, weights, keys[prompt:], sizes["topk"]),
        "index_keys": keys,
        "rows": draw(prompt + tokens, WIDTH),
        "q": draw(tokens, HEADS, WIDTH),
        "dout": draw(tokens, HEADS, VALUE),
    }


def _owned(
    x: dict[str, Any],
    sizes: dict[str, int],
    rank: int,
    size: int,
    group: Any,
    unwritten: int = 0,
    exact: bool = True,
) -> LatentRows | None:
    """The rows before the segment; behind them, of `unwritten` positions of the prompt, is what memory held: NaN."""
    length = sizes["prompt"]
    if not length and group is None:
        return None
    dtype = x["rows"].dtype
    rows = OwnedRows(
        length=length + unwritten,
        shapes={"latent": (WIDTH,)},
        pages=Pages(sizes["page"], rank, size),
        dtype=dtype,
        device=torch.device("cpu"),
        gradient_dtype=torch.promote_types(dtype, torch.float32) if exact else None,
        constants={"index_key": (INDEX_WIDTH,)},
    )
    for values in rows.values.values():
        values.fill_(math.nan)
    segment = Segment(phase=Phase.CAPTURE, start=0, length=length)
    rows.write(segment, latent=x["rows"][:length], index_key=x["index_keys"][:length])
    return LatentRows(rows, length, group)


def _blocks(sizes: dict[str, int]) -> dict[str, int]:
    return {"query_block": sizes["query_block"], "key_block": sizes["block"]}


def _attention(
    q: torch.Tensor,
    own: torch.Tensor,
    positions: torch.Tensor,
    prompt: LatentRows | None,
    query_block: int,
    sequences: list[slice] | None = None,
) -> torch.Tensor:
    chosen = rows_of_positions(positions, prompt, sequences)
    return sparse_attention(q, own, chosen, prompt, value_width=VALUE, scale=SCALE, query_block=query_block)


def _compare(
    sizes: dict[str, int],
    ties: bool,
    unwritten_pages: int = 1,
    exact: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict[str, float]:
    """On every rank of the world: heads are split over ranks, rows by pages. Returns the largest differences from a
    reference in float64, and of the choice how many positions are others."""
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    rank, group = (dist.get_rank(), dist.group.WORLD) if world > 1 else (0, None)
    sizes = _for_ranks(sizes, world)
    x = _inputs(sizes, ties, dtype)
    length = sizes["prompt"]
    heads = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    prompt = _owned(x, sizes, rank, world, group, unwritten=world * unwritten_pages * sizes["page"], exact=exact)
    chosen = choose_positions(x["index"], prompt, **_blocks(sizes))
    q, current = x["q"][:, heads].clone().requires_grad_(), x["rows"][length:].clone().requires_grad_()
    out = _attention(q, current, chosen, prompt, sizes["query_block"])
    out.backward(x["dout"][:, heads])
    dcurrent = current.grad.double()
    if world > 1:
        dist.all_reduce(dcurrent)  # what the caller's gather does

    whole = _dense_choice(x["index"], x["index_keys"])
    q_whole, rows_whole = x["q"].double().requires_grad_(), x["rows"].double().requires_grad_()
    reference = _dense_sparse_attention(q_whole, rows_whole, whole, VALUE, SCALE)
    reference.backward(x["dout"].double())
    want = whole[rank::world].sort(1).values[:, -chosen.shape[1] :]
    differences = {
        "choice": float((chosen.sort(1).values != want).sum()),
        "out": (out - reference[:, heads]).abs().max().item(),
        "dq": (q.grad - q_whole.grad[:, heads]).abs().max().item(),
        "dcurrent": (dcurrent - rows_whole.grad[length:]).abs().max().item(),
    }
    if prompt is not None and exact:
        own = [i for i in range(length) if i // sizes["page"] % world == rank]
        written, unwritten = prompt.rows.gradients["latent"].tensor_split([len(own)])
        apart = torch.cat([written - rows_whole.grad[own], unwritten])
        differences["dprompt"] = apart.abs().max().item() if len(apart) else 0.0
    return differences


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "detached"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_rank_equals_dense(sizes: dict[str, int], exact: bool, ties: bool) -> None:
    differences = _compare(sizes, ties, exact=exact)
    assert differences.pop("choice") == 0
    assert all(value < 1e-13 for value in differences.values()), differences


def _compare_all(ties: tuple[bool, ...], dtype: torch.dtype) -> dict[tuple[str, bool, bool], dict[str, float]]:
    """By name of the sizes, ties, and whether the prompt's gradient is wanted."""
    return {
        (name, tied, exact): _compare(SIZES[name], tied, exact=exact, dtype=dtype)
        for name, tied, exact in itertools.product(SIZES, ties, (False, True))
    }


@pytest.mark.parametrize("world", [2, 4])
def test_owners_equal_dense(ranks: Ranks, world: int) -> None:
    for rank, results in enumerate(ranks.run(Layout(tp=world), _compare_all, (False, True), torch.float64)):
        for case, differences in results.items():
            assert differences.pop("choice") == 0, (rank, case)
            assert all(value < 1e-13 for value in differences.values()), (rank, case, differences)


def test_owners_in_bfloat16(ranks: Ranks) -> None:
    """Inputs are the reference's. With ties index scores are integers, and exact; the rest is rounded at the end, and
    gradients by the rounded probabilities and scores' gradients that they are made of."""
    for rank, results in enumerate(ranks.run(Layout(tp=2), _compare_all, (True,), torch.bfloat16)):
        for case, differences in results.items():
            assert differences.pop("choice") == 0, (rank, case)
            assert all(value < 0.04 for value in differences.values()), (rank, case, differences)


@pytest.mark.parametrize("world", [2, 4])
def test_an_owner_may_have_no_rows_at_all(ranks: Ranks, world: int) -> None:
    for rank, differences in enumerate(ranks.run(Layout(tp=world), _compare, SIZES["short_prompt"], False, 0)):
        assert all(value < 1e-13 for value in differences.values()), (rank, differences)


def _compare_choices_in_float32() -> dict[str, bool]:
    """With ties: scores are integers, and as exact as in float64; positions travel as int32."""
    group = torch.distributed.group.WORLD
    same = {}
    for name, sizes in SIZES.items():
        sizes = _for_ranks(sizes, group.size())
        x = _inputs(sizes, True, torch.float32)
        prompt = _owned(x, sizes, group.rank(), group.size(), group)
        chosen = choose_positions(x["index"], prompt, **_blocks(sizes)).sort(1).values
        want = _dense_choice(x["index"], x["index_keys"]).sort(1).values
        same[name] = torch.equal(chosen, want if prompt is None else want[group.rank() :: group.size()])
    return same


def test_owners_choose_in_float32(ranks: Ranks) -> None:
    for rank, same in enumerate(ranks.run(Layout(tp=2), _compare_choices_in_float32)):
        assert all(same.values()), (rank, same)


def test_ties_go_to_the_lower_position() -> None:
    """With all scores 0 the first positions win, whatever the blocks."""
    index = IndexQueries(torch.zeros(3, 2, 4), torch.ones(3, 2), torch.zeros(3, 4), 5)
    sizes = _sizes(20, 3, 5, 3, 4, 2)
    x = {"rows": torch.zeros(23, WIDTH), "index_keys": torch.zeros(23, INDEX_WIDTH)[:, :4]}
    rows = OwnedRows(
        length=20,
        shapes={"index_key": (4,)},
        pages=Pages(3, 0, 1),
        dtype=torch.float32,
        device=torch.device("cpu"),
        gradient_dtype=None,
    )
    rows.write(Segment(phase=Phase.CAPTURE, start=0, length=20), index_key=x["index_keys"][:20])
    chosen = choose_positions(index, LatentRows(rows, 20, None), **_blocks(sizes))
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_a_score_that_is_nan_takes_its_own_place_only() -> None:
    """It counts as the highest, as in stock, and is no error, which one owner would have alone while the others wait;
    with ties, that are the harder case."""
    keys = torch.zeros(12, 4)
    keys[[3, 7]] = math.nan
    index = IndexQueries(torch.zeros(12, 2, 4), torch.ones(12, 2), keys, 5)
    assert choose_positions(index, None, query_block=12, key_block=12)[-1].tolist() == [0, 1, 2, 3, 7]


def test_rows_that_are_not_written_are_not_read() -> None:
    prompt = _owned(_inputs(SIZES["odd"], False), SIZES["odd"], 0, 1, None, unwritten=7)
    assert prompt is not None
    beyond = LatentRows(prompt.rows, prompt.end + 1, None)
    for read in (lambda: list(beyond.index_keys(19)), lambda: beyond.latents_and(torch.zeros(2, WIDTH))):
        with pytest.raises(RuntimeError, match="rows before 102 read when 101 of 108 are written"):
            read()


def test_float32_is_close() -> None:
    x = _inputs(SIZES["odd"], False, torch.float32)
    prompt = _owned(x, SIZES["odd"], 0, 1, None)
    chosen = choose_positions(x["index"], prompt, **_blocks(SIZES["odd"]))
    out = _attention(x["q"], x["rows"][101:], chosen, prompt, 5)
    reference = _dense_sparse_attention(x["q"], x["rows"], _dense_choice(x["index"], x["index_keys"]), VALUE, SCALE)
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)


def test_gradient_is_injected_and_rooted_on_the_owner() -> None:
    sizes = SIZES["odd"]
    segment = Segment(phase=Phase.PROMPT, start=0, length=101)
    x = _inputs(sizes, False)
    for root in (False, True):
        prompt = _owned(x, sizes, 1, 3, None)
        assert prompt is not None
        prompt.rows.gradients["latent"].normal_(generator=torch.Generator().manual_seed(0))
        own = [i for i in range(101) if i // sizes["page"] % 3 == 1]
        latent = x["rows"][:101].clone().requires_grad_()
        if root:
            out = root_at_rows(x["q"].new_zeros(101, HEADS, WIDTH), VALUE, prompt.rows, segment, latent=latent)
            assert out.shape == (101, HEADS, VALUE) and not out.any()
            out.sum().backward()
            want = torch.zeros_like(latent)
        else:
            (out,) = inject_row_gradients(prompt.rows, segment, latent=latent)
            out.sum().backward()
            want = torch.ones_like(latent)
        want[own] += prompt.rows.gradients["latent"]
        torch.testing.assert_close(latent.grad, want)
        with pytest.raises(RuntimeError, match="once and in reverse order"):
            prompt.rows.take_gradient(segment, latent=want)


def test_each_position_has_one_owner_and_row() -> None:
    for size in (1, 3):
        owners, rows = Pages(7, 0, size).owners_and_rows(torch.arange(100))
        counts = [0] * size
        for position, (owner, row) in enumerate(zip(owners.tolist(), rows.tolist(), strict=True)):
            assert (owner, row) == (position // 7 % size, counts[owner])
            counts[owner] += 1
        assert counts == [Pages(7, rank, size).owned_before(100) for rank in range(size)]
        assert Pages(7, size - 1, size).most_owned_before(100) == max(counts)


@pytest.mark.parametrize(
    ("constants", "constant_bytes"),
    [({"index_key": (128,)}, 128 * 2), ({}, 0)],
    ids=["computing", "reusing"],
)
def test_state_bytes_at_full_size(constants: dict[str, tuple[int]], constant_bytes: int) -> None:
    """GLM-5.2's widths in bfloat16 on TP8: owned rows x (576 x 2 bytes; where an index is computed 128 x 2 more)."""
    length, page, owners = 10_000, 256, 8
    owned_total = 0
    for rank in range(owners):
        state = PromptState(length, StateOptions(page_tokens=page))
        rows = state.rows(
            7,
            shapes={"latent": (576,)},
            owner_rank=rank,
            owners=owners,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
            constants=constants,
        )
        owned = sum(1 for p in range(length) if p // page % owners == rank)
        owned_total += owned
        assert len(rows.values["latent"]) == owned
        assert state.bytes() == owned * (576 * 2 + constant_bytes)
        assert state.gradient_bytes() == owned * 576 * 4  # float32, and none for index keys
        assert abs(owned - length / owners) < page
    assert owned_total == length


@pytest.mark.parametrize("query_block", [1, 3, 5, 100])
@pytest.mark.parametrize(("prompt", "topk"), [(23, 6), (3, 64)], ids=["long prompt", "topk beyond all"])
def test_packed_sequences_choose_and_attend_as_each_alone(prompt: int, topk: int, query_block: int) -> None:
    sizes = _sizes(prompt, 12, topk, 4, 5, query_block)
    x = _inputs(sizes, True)
    packed = [slice(0, 5), slice(5, 6), slice(6, 12)]

    def run(tokens: slice, sequences: list[slice] | None) -> tuple[torch.Tensor, ...]:
        owned = _owned(x, sizes, 0, 1, None)
        assert owned is not None
        index = IndexQueries(*(t[tokens] for t in (x["index"].queries, x["index"].weights, x["index"].keys)), topk)
        chosen = choose_positions(index, owned, **_blocks(sizes), sequences=sequences)
        q, own = (t[tokens].clone().requires_grad_() for t in (x["q"], x["rows"][prompt:]))
        out = _attention(q, own, chosen, owned, query_block, sequences)
        out.backward(x["dout"][tokens])
        chosen = pad(chosen, (0, min(topk, prompt + 6) - chosen.shape[1]), value=-1)  # the longest has 6 tokens
        return chosen, out, q.grad, own.grad, owned.rows.gradients["latent"]

    *together, gradient = run(slice(0, 12), packed)
    alone = [run(sequence, None) for sequence in packed]
    for one, parts in zip(together, zip(*(parts[:-1] for parts in alone), strict=True), strict=True):
        torch.testing.assert_close(one, torch.cat(parts), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, sum(parts[-1] for parts in alone), rtol=0, atol=1e-12)


def test_nothing_of_queries_times_prompt_exists() -> None:
    """The largest tensor that forward and backward make is the gradient of the rows of the layer and the segment."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            before = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            made = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
            new = [x for x in made if x.untyped_storage().data_ptr() not in before]  # neither views nor in place
            self.elements = max([self.elements, *(x.numel() for x in new)])
            return out

    for length in (512, 4096):
        sizes = _sizes(length, 16, 8, 32, 64, 4)
        x = _inputs(sizes, False, torch.float32)
        prompt = _owned(x, sizes, 0, 1, None)
        q, current = x["q"].clone().requires_grad_(), x["rows"][length:].clone().requires_grad_()
        with Largest() as largest:
            chosen = choose_positions(x["index"], prompt, **_blocks(sizes))
            out = _attention(q, current, chosen, prompt, 4)
            out.backward(x["dout"])
        assert largest.elements == (1 + length + 16) * WIDTH
