"""Rollout files: what is read, what is refused and in which words. Numbers of invariants are rollouts.py's.

Not exercised: a file that grows while it is read, and tokenizers with a normaliser that changes text.
"""

import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_longstraw.config import ConfigError
from megatron_longstraw.rollouts import Response, RolloutError, RolloutGroup, load_tokenizer, read_groups

REAL_FILE = Path(__file__).resolve().parents[2] / "shared" / "data" / "agent_rollouts.jsonl"
DROP = object()
PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")


def response(**changes: Any) -> dict[str, Any]:
    """A good response of 3 tokens, with changes; DROP takes a key out."""
    return {key: value for key, value in ({"ids": [1, 2, 3], "reward": 1} | changes).items() if value is not DROP}


def group(*responses: dict[str, Any], **changes: Any) -> dict[str, Any]:
    tree = {"group_id": "g", "prompt": "hi", "responses": list(responses or [response()])} | changes
    return {key: value for key, value in tree.items() if value is not DROP}


def sample(**changes: Any) -> dict[str, Any]:
    return response(**({"group_id": "g", "prompt": "hi"} | changes))


def write(folder: Path, *lines: Any, name: str = "rollouts.jsonl") -> Path:
    """A file of lines: bytes and texts as they are, all else as JSON."""
    path = folder / name
    raw = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in raw))
    return path


def groups_of(path: Path, **settings: Any) -> Iterator[RolloutGroup]:
    arguments: dict[str, Any] = {"tokenizer": load_tokenizer("bytes"), "vocab_size": 256} | settings
    return read_groups(path, **arguments)


def read(folder: Path, *lines: Any, **settings: Any) -> list[RolloutGroup]:
    return list(groups_of(write(folder, *lines), **settings))


def plain(value: Any) -> Any:
    """Something that == compares, of a group or a response; without the source."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, Response | RolloutGroup):
        return {key: plain(each) for key, each in vars(value).items() if key != "source"}
    return value


# --- what is read ---------------------------------------------------------------------------------------------


def test_every_field_of_a_group_arrives(tmp_path: Path) -> None:
    full = response(
        ids=[5, 6],
        reward=-2,
        loss_mask=[1, 0],
        rollout_logprobs=[-1, -0.5],
        old_logprobs=[-2.5, 0],
        ref_logprobs=[-3, 1e-4],
        advantage=[0.5, -7],
        truncated=True,
    )
    (got,) = read(tmp_path, group(full, response(advantage=2), temperature=0.7, meta={"any": [None, {"x": 1}]}))
    assert (got.group_id, got.temperature, got.meta) == ("g", 0.7, {"any": [None, {"x": 1}]})
    assert got.source == f"{tmp_path}/rollouts.jsonl:1"
    assert plain(got.prompt_ids) == ("<i8", [104, 105])
    first, second = got.responses
    assert plain(first) == {
        "ids": ("<i8", [5, 6]),
        "mask": ("|b1", [True, False]),
        "reward": -2.0,
        "truncated": True,
        "rollout_log_probs": ("<f8", [-1.0, -0.5]),
        "old_log_probs": ("<f8", [-2.5, 0.0]),
        "ref_log_probs": ("<f8", [-3.0, 1e-4]),
        "advantages": ("<f8", [0.5, -7.0]),
    }
    assert isinstance(first.reward, float)
    assert plain(second.advantages) == ("<f8", [2.0, 2.0, 2.0])
    assert second.mask.all() and not second.truncated and second.rollout_log_probs is None


def test_defaults_are_used_where_the_file_is_silent(tmp_path: Path) -> None:
    silent, own = read(tmp_path, group(), group(group_id="h", temperature=2), temperature=0.5)
    assert (silent.temperature, own.temperature, silent.meta) == (0.5, 2.0, None)


def test_null_is_an_absent_key(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("text", "segments", "loss_mask", "ref_logprobs", "advantage", "truncated"))
    with_nulls = group(response(**nothing), prompt_ids=None, temperature=None, meta=None)
    (got,), (needed,) = read(tmp_path, with_nulls), read(tmp_path, group())
    assert plain(got) == plain(needed)


@pytest.mark.parametrize("group_id", [7, "7"], ids=["integer", "text"])
def test_group_id_is_kept_as_text(tmp_path: Path, group_id: Any) -> None:
    assert read(tmp_path, group(group_id=group_id))[0].group_id == "7"


@pytest.mark.parametrize("empty", [{"ids": []}, {"text": ""}, {"segments": []}], ids=["ids", "text", "segments"])
def test_empty_response_is_legal(tmp_path: Path, empty: dict[str, Any]) -> None:
    line = group(response(**({"ids": DROP, "loss_mask": [], "old_logprobs": [], "advantage": 3} | empty)))
    (got,) = read(tmp_path, line, require_ref_log_probs=True)[0].responses
    assert plain(got.ids) == ("<i8", []) and plain(got.mask) == ("|b1", [])
    assert plain(got.old_log_probs) == plain(got.advantages) == ("<f8", [])


def test_mask_inside_a_response_is_kept(tmp_path: Path) -> None:
    mask = [1, 1, 0, 0, 1, 1]
    as_numbers, as_bools = (
        response(ids=[9] * 6, loss_mask=mask),
        response(ids=[9] * 6, loss_mask=[m == 1 for m in mask]),
    )
    for got in read(tmp_path, group(as_numbers, as_bools))[0].responses:
        assert got.mask.tolist() == [True, True, False, False, True, True]


def test_segments_are_joined_and_their_mask_meets_loss_mask(tmp_path: Path) -> None:
    segments = [{"text": "ab", "train": True}, {"ids": [0, 255], "train": False}, {"text": "\u00e9", "train": True}]
    line = group(response(ids=DROP, segments=segments), response(ids=DROP, segments=segments, loss_mask=[1, 0] * 3))
    alone, both = read(tmp_path, line)[0].responses
    assert alone.ids.tolist() == both.ids.tolist() == [97, 98, 0, 255, 0xC3, 0xA9]
    assert alone.mask.tolist() == [True, True, False, False, True, True]
    assert both.mask.tolist() == [True, False, False, False, True, False]


def test_no_id_is_special(tmp_path: Path) -> None:
    """Invariant 5: padding and end-of-text look like any token."""
    ids = [0, 0, 255, 1, 0, 0]
    got = read(tmp_path, group(response(ids=ids), prompt=DROP, prompt_ids=ids))[0]
    assert got.prompt_ids.tolist() == got.responses[0].ids.tolist() == ids
    assert got.responses[0].mask.all()


@pytest.mark.parametrize(("limit", "kept"), [(None, "abcde"), (9, "abcde"), (5, "abcde"), (4, "bcde"), (1, "e")])
def test_long_prompts_keep_their_end(tmp_path: Path, limit: int | None, kept: str) -> None:
    (got,) = read(tmp_path, group(prompt="abcde"), max_prompt_tokens=limit)
    assert bytes(got.prompt_ids.tolist()).decode() == kept


def test_max_prompt_tokens_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens=0"):
        groups_of(write(tmp_path, group()), max_prompt_tokens=0)


def test_blank_lines_crlf_and_a_last_line_without_newline(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [json.dumps(group(group_id=i)) for i in range(2)]
    path.write_bytes(f"\n  \r\n{lines[0]}\r\n\t\n{lines[1]}".encode())
    assert [got.source for got in groups_of(path)] == [f"{path}:3", f"{path}:5"]


# --- sample form ----------------------------------------------------------------------------------------------


def test_samples_merge_while_the_id_stays(tmp_path: Path) -> None:
    meta = {"k": [1]}
    first = [sample(reward=1, meta=meta), sample(reward=2), sample(reward=5, meta=meta)]
    last = [sample(group_id="h", reward=3), sample(group_id="h", reward=4, temperature=1.0)]
    got = read(tmp_path, *first, group(group_id="w"), *last)
    assert [(each.group_id, each.source[-2:], len(each.responses)) for each in got] == [
        ("g", ":1", 3),
        ("w", ":4", 1),
        ("h", ":5", 2),
    ]
    assert [each.reward for each in got[2].responses] == [3.0, 4.0]
    assert (got[0].meta, got[2].meta) == (meta, None)


def test_a_prompt_is_tokenised_once_per_group(tmp_path: Path) -> None:
    class Counting:
        vocab_size = 256
        texts: tuple[str, ...] = ()

        def encode(self, text: str) -> list[int]:
            self.texts += (text,)
            return list(text.encode())

        def decode(self, ids: Any) -> str:
            raise NotImplementedError

    tokenizer = Counting()
    (got,) = read(tmp_path, *[sample(ids=DROP, text=f"r{i}") for i in range(3)], tokenizer=tokenizer)
    assert len(got.responses) == 3
    assert tokenizer.texts == ("hi", "r0", "r1", "r2")


def test_a_prompt_as_text_equals_the_same_prompt_as_ids(tmp_path: Path) -> None:
    (got,) = read(tmp_path, sample(), sample(prompt=DROP, prompt_ids=[104, 105]))
    assert len(got.responses) == 2


MERGE_ERRORS = {
    "other-text": (sample(prompt="hI"), "prompt"),
    "other-ids": (sample(prompt=DROP, prompt_ids=[104, 106]), "prompt_ids"),
    "other-temperature": (sample(temperature=0.9), "temperature"),
    "other-meta": (sample(meta={"k": 2}), "meta"),
}


@pytest.mark.parametrize(("second", "field"), MERGE_ERRORS.values(), ids=MERGE_ERRORS)
def test_samples_of_a_group_must_agree(tmp_path: Path, second: dict[str, Any], field: str) -> None:
    path = write(tmp_path, sample(group_id="f"), sample(), second)
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    assert str(error.value) == f"{path}:3: {field}: differs from {path}:2, needs the same in every sample of group 'g'"


def test_prompts_are_compared_before_they_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path, sample(prompt="abc"), sample(prompt="xbc"))
    with pytest.raises(RolloutError, match=r":2: prompt: differs from .*:1"):
        list(groups_of(path, max_prompt_tokens=2))


REPEATS = {
    "samples-apart": [sample(), sample(group_id="h"), sample()],
    "groups-apart": [group(), group(group_id="h"), group()],
    "groups-in-a-row": [group(group_id="h"), group(), group()],
    "group-after-its-samples": [sample(), sample(), group()],
    "sample-after-its-group": [group(group_id="h"), group(), sample()],
    "integer-and-text": [group(group_id="7"), group(group_id="h"), group(group_id=7)],
}


@pytest.mark.parametrize("lines", REPEATS.values(), ids=REPEATS)
def test_a_group_id_names_one_group(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """Invariant 4, in both line forms."""
    path = write(tmp_path, *lines)
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    assert str(error.value).startswith(f"{path}:3: group_id: got '{lines[2]['group_id']}', which an earlier group has")


# --- what is refused (invariants 2 and 3) ---------------------------------------------------------------------

BAD_RESPONSES = {  # id: (changes to a response of ids 1, 2, 3; field; what the error says)
    "no-tokens-given": ({"ids": DROP}, "ids|text|segments", "got none, needs exactly one"),
    "ids-and-text": ({"text": "x"}, "ids|text|segments", "got ids and text, needs exactly one"),
    "ids-not-a-list": ({"ids": "123"}, "ids", "got '123', needs a list"),
    "ids-bool": ({"ids": [1, True]}, "ids[1]", "got True, needs an integer id from 0 to 255"),
    "ids-float": ({"ids": [1.0]}, "ids[0]", "got 1.0, needs an integer id"),
    "ids-negative": ({"ids": [4, -1]}, "ids[1]", "got -1, needs an integer id from 0 to 255 (vocab_size=256)"),
    "ids-too-large": ({"ids": [4, 5, 256]}, "ids[2]", "got 256, needs an integer id from 0 to 255 (vocab_size=256)"),
    "ids-beyond-int64": ({"ids": [2**80]}, "ids[0]", f"got {2**80}"),
    "text-not-a-text": ({"ids": DROP, "text": 5}, "text", "got 5, needs a text"),
    "text-lone-surrogate": ({"ids": DROP, "text": "ab\ud800"}, "text", r"lone surrogate '\ud800' at character 2"),
    "segments-not-a-list": ({"ids": DROP, "segments": {}}, "segments", "got {}, needs a list"),
    "segment-not-an-object": ({"ids": DROP, "segments": ["x"]}, "segments[0]", "got 'x', needs an object"),
    "segment-unknown-key": (
        {"ids": DROP, "segments": [{"text": "x", "trian": True}]},
        "segments[0].'trian'",
        "unknown key; the keys of a segment are text, ids, train",
    ),
    "segment-no-train": ({"ids": DROP, "segments": [{"text": "x"}]}, "segments[0].train", "missing, needs true or"),
    "segment-train-number": (
        {"ids": DROP, "segments": [{"text": "x", "train": True}, {"text": "y", "train": 1}]},
        "segments[1].train",
        "got 1, needs true or false",
    ),
    "segment-text-and-ids": (
        {"ids": DROP, "segments": [{"text": "x", "ids": [1], "train": True}]},
        "segments[0].ids|text",
        "got ids and text, needs exactly one",
    ),
    "segment-id-too-large": (
        {"ids": DROP, "segments": [{"ids": [7, 300], "train": True}]},
        "segments[0].ids[1]",
        "got 300, needs an integer id from 0 to 255",
    ),
    "reward-missing": ({"reward": DROP}, "reward", "missing, needs a finite number"),
    "reward-null": ({"reward": None}, "reward", "got None, needs a finite number"),
    "reward-text": ({"reward": "1"}, "reward", "got '1', needs a finite number"),
    "reward-bool": ({"reward": True}, "reward", "got True, needs a finite number"),
    "reward-nan": ({"reward": float("nan")}, "reward", "got nan, needs a finite number"),
    "reward-infinite": ({"reward": float("-inf")}, "reward", "got -inf, needs a finite number"),
    "reward-overflows": ({"reward": 10**400}, "reward", "needs a finite number"),
    "truncated-number": ({"truncated": 1}, "truncated", "got 1, needs true or false"),
    "mask-short": ({"loss_mask": [1, 0]}, "loss_mask", "got 2 values, needs one for each of the response's 3 tokens"),
    "mask-two": ({"loss_mask": [1, 0, 2]}, "loss_mask[2]", "got 2, needs 0, 1, true or false"),
    "mask-float": ({"loss_mask": [1, 0.0, 1]}, "loss_mask[1]", "got 0.0, needs 0, 1, true or false"),
    "mask-of-text-in-characters": (
        {"ids": DROP, "text": "\u00e9a", "loss_mask": [1, 1]},
        "loss_mask",
        "got 2 values, needs one for each of the response's 3 tokens",
    ),
    "mask-of-segments": (
        {"ids": DROP, "segments": [{"text": "ab", "train": True}], "loss_mask": [1]},
        "loss_mask",
        "got 1 values, needs one for each of the response's 2 tokens",
    ),
    "rollout-long": ({"rollout_logprobs": [-1] * 4}, "rollout_logprobs", "got 4 values, needs one for each of"),
    "old-short": ({"old_logprobs": []}, "old_logprobs", "got 0 values, needs one for each of the response's 3"),
    "ref-long": ({"ref_logprobs": [0] * 5}, "ref_logprobs", "got 5 values, needs one for each of"),
    "advantage-long": ({"advantage": [0] * 4}, "advantage", "got 4 values, needs one for each of the response's 3"),
    "old-not-a-list": ({"old_logprobs": -1.0}, "old_logprobs", "got -1.0, needs a list"),
    "old-nan": ({"old_logprobs": [-1, float("nan"), 0]}, "old_logprobs[1]", "got nan, needs a finite log-prob"),
    "rollout-minus-infinity": (
        {"rollout_logprobs": [-1, 0, float("-inf")]},
        "rollout_logprobs[2]",
        "got -inf, needs a finite log-probability",
    ),
    "ref-bool": ({"ref_logprobs": [False, 0, 0]}, "ref_logprobs[0]", "got False, needs a finite log-probability"),
    "ref-positive": ({"ref_logprobs": [0, 0.01, 0]}, "ref_logprobs[1]", "got 0.01, needs a finite log-probability"),
    "old-probability": ({"old_logprobs": [0.5, 0, 0]}, "old_logprobs[0]", "which can't be positive"),
    "advantage-text": ({"advantage": "high"}, "advantage", "got 'high', needs a finite number, or a list"),
    "advantage-infinite": ({"advantage": float("inf")}, "advantage", "got inf, needs a finite number"),
    "advantage-bool-in-list": ({"advantage": [0, True, 0]}, "advantage[1]", "got True, needs a finite number"),
    "unknown-key": ({"rewards": 2}, "'rewards'", "unknown key; the keys of a"),
}


@pytest.mark.parametrize("form", ["group", "sample"])
@pytest.mark.parametrize(("changes", "field", "text"), BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_bad_responses(tmp_path: Path, form: str, changes: dict[str, Any], field: str, text: str) -> None:
    """The error names file, line and field; the groups before it have arrived."""
    if form == "group":
        lines, place = [group(group_id="f"), "", group(response(), response(**changes))], f"responses[1].{field}"
    else:
        lines, place = [sample(group_id="f"), sample(), sample(**changes)], field
    path = write(tmp_path, *lines)
    groups = groups_of(path)
    assert next(groups).group_id == "f"
    with pytest.raises(RolloutError) as error:
        next(groups)
    message = str(error.value)
    assert message.startswith(f"{path}:3: {place}: ")
    assert text in message


BAD_GROUPS = {  # id: (line; field; what the error says)
    "no-group-id": (group(group_id=DROP), "group_id", "missing, needs a text or an integer"),
    "group-id-bool": (group(group_id=True), "group_id", "got True, needs a text or an integer"),
    "group-id-float": (sample(group_id=1.5), "group_id", "got 1.5, needs a text or an integer"),
    "group-id-lone-surrogate": (
        group(group_id="\udfff"),
        "group_id",
        r"got the lone surrogate '\udfff' at character 0",
    ),
    "no-prompt": (group(prompt=DROP), "prompt|prompt_ids", "got none, needs exactly one"),
    "prompt-twice": (group(prompt_ids=[1]), "prompt|prompt_ids", "got prompt and prompt_ids, needs exactly one"),
    "prompt-empty": (group(prompt=""), "prompt", "got '', needs a prompt of at least 1 token"),
    "prompt-ids-empty": (
        sample(prompt=DROP, prompt_ids=[]),
        "prompt_ids",
        "got [], needs a prompt of at least 1 token",
    ),
    "prompt-number": (group(prompt=3), "prompt", "got 3, needs a text"),
    "prompt-id-bool": (group(prompt=DROP, prompt_ids=[1, False]), "prompt_ids[1]", "got False, needs an integer id"),
    "prompt-id-too-large": (
        group(prompt=DROP, prompt_ids=[1, 2, 999]),
        "prompt_ids[2]",
        "got 999, needs an integer id from 0 to 255 (vocab_size=256)",
    ),
    "prompt-lone-surrogate": (group(prompt="\udc80"), "prompt", r"got the lone surrogate '\udc80' at character 0"),
    "temperature-zero": (group(temperature=0), "temperature", "got 0, needs a finite number > 0"),
    "temperature-nan": (sample(temperature=float("nan")), "temperature", "got nan, needs a finite number > 0"),
    "temperature-bool": (group(temperature=True), "temperature", "got True, needs a finite number > 0"),
    "meta-list": (group(meta=[1]), "meta", "got [1], needs an object"),
    "responses-empty": (group(responses=[]), "responses", "got [], needs at least one response"),
    "responses-null": (group(responses=None), "responses", "got None, needs a list"),
    "responses-object": (group(responses={"ids": [1]}), "responses", "got {'ids': [1]}, needs a list"),
    "response-number": (group(responses=[response(), 5]), "responses[1]", "got 5, needs an object"),
    "unknown-key": (
        group(temprature=1),
        "'temprature'",
        "unknown key; the keys of a group are group_id, prompt, prompt_ids, temperature, meta, responses",
    ),
    "both-forms-in-a-line": (group(reward=1), "'reward'", "unknown key; the keys of a group are"),
    "responses-misspelt": (
        group(responses=DROP, response=[response()]),
        "'response'",
        'unknown key; the keys of a sample (a line without "responses") are',
    ),
}


@pytest.mark.parametrize(("line", "field", "text"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_bad_groups(tmp_path: Path, line: dict[str, Any], field: str, text: str) -> None:
    path = write(tmp_path, group(group_id="f"), line)
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    message = str(error.value)
    assert message.startswith(f"{path}:2: {field}: ")
    assert text in message


BAD_LINES = {  # id: (line; the error after FILE:LINE)
    "not-json": ('{"group_id": x}', "column 14: not JSON: Expecting value"),
    "cut-off": ('{"group_id": "g"', "column 17: not JSON: Expecting ',' delimiter"),
    "two-objects": ("{}{}", "column 3: not JSON: Extra data"),
    "list": ("[1, 2]", "line: got [1, 2], needs a JSON object"),
    "null": ("null", "line: got None, needs a JSON object"),
    "not-utf8": (b'{"prompt": "\xff"}', "byte 13: got invalid start byte, needs UTF-8"),
    "byte-order-mark": (b"\xef\xbb\xbf{}", "column 1: not JSON: Unexpected UTF-8 BOM"),
    "key-twice": ('{"group_id": "g", "group_id": "h"}', "'group_id': got the key twice in one object, needs it once"),
    "key-twice-inside": (
        '{"group_id": "g", "prompt": "p", "responses": [{"ids": [1], "reward": 1, "reward": 2}]}',
        "'reward': got the key twice in one object",
    ),
    "deep": ('{"meta": ' + "[" * 100_000 + "]" * 100_000 + "}", "line: too deeply nested"),
    "endless-integer": ('{"group_id": ' + "1" * 5000 + "}", "Exceeds the limit"),
}


@pytest.mark.parametrize(("line", "text"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines(tmp_path: Path, line: str | bytes, text: str) -> None:
    path = write(tmp_path, group(group_id="f"), "", line)
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    assert str(error.value).startswith(f"{path}:3: {text}")


HUGE = {
    "text": response(ids="x" * 100_000),
    "list": response(reward=[[1] * 50] * 50),
    "integer": response(ids=[int("9" * 4000)]),
    "object": response(reward={"k" * 30 + str(i): "v" * 1000 for i in range(1000)}),
    "key": response(**{"k" * 100_000: 1}),
}


@pytest.mark.parametrize("bad", HUGE.values(), ids=HUGE)
def test_errors_stay_short(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = write(tmp_path, group(bad))
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    assert len(str(error.value).removeprefix(str(path))) < 250


@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
def test_a_file_without_groups_is_an_error(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RolloutError) as error:
        list(groups_of(path))
    assert str(error.value) == f"{path}: got no groups, needs at least one line with a JSON object"


@pytest.mark.parametrize(("name", "text"), [("none.jsonl", "No such file"), ("", "Is a directory")])
def test_unreadable_files(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(RolloutError) as error:
        list(groups_of(tmp_path / name))
    assert str(error.value).startswith(f"{tmp_path / name}: can't be read: {text}")


def test_kl_needs_reference_log_probs(tmp_path: Path) -> None:
    good = response(ref_logprobs=[-1, -2, -3])
    assert len(read(tmp_path, group(good, response(ids=[])), require_ref_log_probs=True)) == 1
    path = write(tmp_path, group(good, response()))
    with pytest.raises(RolloutError) as error:
        list(groups_of(path, require_ref_log_probs=True))
    message = f"{path}:1: responses[1].ref_logprobs: missing, needs one per token: objective.kl_coef > 0 uses them"
    assert str(error.value) == message


# --- streaming (invariant 1) ----------------------------------------------------------------------------------


def test_groups_arrive_before_a_later_line_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, group(group_id="a"), sample(group_id="b"), sample(group_id="b"), group(group_id="c"), "{")
    groups = groups_of(path)
    assert [next(groups).group_id for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(RolloutError, match=":5: column"):
        next(groups)


def test_a_group_arrives_while_the_writer_still_writes(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    arrived, in_time = threading.Event(), []

    def write_two() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(json.dumps(group(group_id="a")).encode() + b"\n")
            in_time.append(arrived.wait(timeout=20))
            file.write(json.dumps(group(group_id="b")).encode() + b"\n")

    writer = threading.Thread(target=write_two, daemon=True)
    writer.start()
    ids = []
    for got in groups_of(path):
        ids.append(got.group_id)
        arrived.set()
    writer.join(timeout=20)
    assert ids == ["a", "b"]
    assert in_time == [True]


@pytest.mark.parametrize("form", ["group", "sample"])
def test_memory_holds_one_group(tmp_path: Path, form: str) -> None:
    line = group if form == "group" else sample
    path = write(tmp_path, *[line(group_id=i, prompt="x" * 10_000) for i in range(100)])
    tracemalloc.start()
    count = sum(1 for _ in groups_of(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 100
    assert peak < path.stat().st_size / 2


# --- tokenizers -----------------------------------------------------------------------------------------------


def test_bytes_tokenizer_round_trip() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "a\u00e9\u4e2d\U0001f600\x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([104, 300, 105]) == "h\ufffdi"
    assert tokenizer.vocab_size == 256


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer.json that asks for special tokens, truncation and padding."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "he", "[BOS]", "[PAD]"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("h", "e")]))
    tokenizer.add_special_tokens(["[BOS]", "[PAD]"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", vocab["[BOS]"])]
    )
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=12, pad_id=vocab["[PAD]"], pad_token="[PAD]")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["", "tokenizer.json"], ids=["folder", "file"])
def test_huggingface_tokenizer(byte_level: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(byte_level / name))
    assert tokenizer.vocab_size == 259
    ids = tokenizer.encode("hehex [BOS]\u00e9")
    assert ids[:2] == [256, 256] and ids[4] == 257  # "he", "he", "x", " ", "[BOS]"
    assert len(ids) == 7  # and the two bytes of the last letter: no token added, cut or padded
    assert tokenizer.decode(ids) == "hehex [BOS]\u00e9"
    assert tokenizer.encode("") == []


def test_huggingface_tokenizer_reads_groups(byte_level: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(byte_level))
    segments = [{"text": "he", "train": True}, {"text": "hehe[PAD]", "train": False}]
    line = group(response(ids=DROP, segments=segments), prompt="he")
    (got,) = read(tmp_path, line, tokenizer=tokenizer, vocab_size=259)
    assert got.prompt_ids.tolist() == [256]
    assert got.responses[0].ids.tolist() == [256, 256, 256, 258]
    assert got.responses[0].mask.tolist() == [True, False, False, False]


def test_a_tokenizer_larger_than_the_model_is_caught(byte_level: Path, tmp_path: Path) -> None:
    path = write(tmp_path, group(prompt="xhe"))
    with pytest.raises(RolloutError) as error:
        list(groups_of(path, tokenizer=load_tokenizer(str(byte_level)), vocab_size=256))
    got = "got id 256 as token 1 from the tokenizer, needs an integer id from 0 to 255 (vocab_size=256)"
    assert str(error.value) == f"{path}:1: prompt: {got}"


def test_text_that_a_tokenizer_cannot_encode(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"to": 0, "be": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(str(tmp_path / "words.json"))
    (got,) = read(tmp_path, group(prompt="to be be"), tokenizer=tokenizer)
    assert got.prompt_ids.tolist() == [0, 1, 1]
    path = write(tmp_path, group(response(ids=DROP, text="or not")))
    with pytest.raises(RolloutError, match=r":1: prompt: the tokenizer can't encode it: .*UNK"):
        list(groups_of(path, tokenizer=tokenizer))


@pytest.mark.parametrize("kind", ["missing", "empty-folder", "not-a-tokenizer", "hub-name", "endless", "empty"])
def test_bad_tokenizer_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    other = write(tmp_path, group(), name="other.json")
    names = {
        "missing": str(tmp_path / "none.json"),
        "empty-folder": str(tmp_path / "folder"),
        "not-a-tokenizer": str(other),
        "hub-name": "openai-community/gpt2",
        "endless": "x" * 5000,
        "empty": "",
    }
    with pytest.raises(ConfigError) as error:
        load_tokenizer(names[kind])
    assert str(error.value).startswith(f"data.tokenizer={names[kind]!r}: got ")
    assert 'needs "bytes", or the path of a tokenizer.json' in str(error.value)


def test_reading_bytes_needs_no_heavy_import() -> None:
    code = (
        "import sys; from megatron_longstraw.rollouts import load_tokenizer; load_tokenizer('bytes');"
        "print({'torch', 'transformers', 'megatron', 'tokenizers'} & set(sys.modules))"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- properties -----------------------------------------------------------------------------------------------


def random_response(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A response as the file has it, and as `plain` should show it."""
    parts = [(rng.choices(range(128), k=rng.randrange(5)), rng.random() < 0.5) for _ in range(rng.randrange(4))]
    ids = [i for part, _ in parts for i in part]
    trained = [train for part, train in parts for _ in part]
    form = rng.choice(["ids", "text", "segments"])
    written: Any = {"ids": ids, "text": bytes(ids).decode()}.get(form)
    if form == "segments":
        written = [
            {"train": train} | ({"ids": part} if rng.random() < 0.5 else {"text": bytes(part).decode()})
            for part, train in parts
        ]
    mask = trained if form == "segments" else [True] * len(ids)
    tree: dict[str, Any] = {form: written, "reward": rng.uniform(-1, 1)}
    if rng.random() < 0.5:
        tree["loss_mask"] = [rng.choice([0, 1, True, False]) for _ in ids]
        mask = [a and bool(b) for a, b in zip(mask, tree["loss_mask"], strict=True)]
    needed = {"ids": ("<i8", ids), "mask": ("|b1", mask), "reward": tree["reward"], "truncated": False}
    for name in PER_TOKEN:
        needed[name] = None
        if rng.random() < 0.5:
            values = [-rng.random() for _ in ids]
            tree["advantage" if name == "advantages" else name.replace("log_probs", "logprobs")] = values
            needed[name] = ("<f8", values)
    if rng.random() < 0.5:
        tree["truncated"] = needed["truncated"] = rng.random() < 0.5
    return tree, needed


@pytest.mark.parametrize("seed", range(20))
def test_random_groups_are_equal_in_both_forms(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    whole, samples, needed = [], [], []
    for number in range(rng.randrange(1, 6)):
        prompt = rng.choices(range(128), k=rng.randrange(1, 9))
        shared = {"group_id": f"group {number}", "temperature": rng.uniform(0.1, 2), "meta": {"n": number}}
        shared |= {"prompt_ids": prompt} if rng.random() < 0.5 else {"prompt": bytes(prompt).decode()}
        pairs = [random_response(rng) for _ in range(rng.randrange(1, 5))]
        whole.append(shared | {"responses": [tree for tree, _ in pairs]})
        samples += [shared | tree for tree, _ in pairs]
        needed.append([prompt, shared["temperature"], [response for _, response in pairs]])
    of_groups, of_samples = read(tmp_path, *whole), read(tmp_path, *samples)
    assert [plain(each) for each in of_groups] == [plain(each) for each in of_samples]
    got = [[each.prompt_ids.tolist(), each.temperature, plain(each.responses)] for each in of_groups]
    assert got == needed
    for each in (r for g in of_groups for r in g.responses):  # invariant 2
        arrays = [each.mask, *(getattr(each, name) for name in PER_TOKEN)]
        assert {len(array) for array in arrays if array is not None} == {len(each.ids)}


# --- real histories -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL_FILE.exists(), reason=f"needs {REAL_FILE}, which lies beside the checkout")
def test_real_agent_histories() -> None:
    trees = [json.loads(line) for line in REAL_FILE.read_text(encoding="utf-8").splitlines()]
    groups = list(groups_of(REAL_FILE))
    assert len(groups) == len(trees) == 30
    partly_masked = 0
    for number, (got, tree) in enumerate(zip(groups, trees, strict=True), 1):
        assert got.source == f"{REAL_FILE}:{number}"
        assert bytes(got.prompt_ids.tolist()).decode() == tree["prompt"]
        assert 2 <= len(got.responses) == len(tree["responses"]) <= 8
        for each, wanted in zip(got.responses, tree["responses"], strict=True):
            parts = [(segment["text"].encode(), segment["train"]) for segment in wanted["segments"]]
            assert bytes(each.ids.tolist()) == b"".join(text for text, _ in parts)
            assert each.mask.tolist() == [train for text, train in parts for _ in text]
            assert each.reward == wanted["reward"]
            partly_masked += 0 < each.mask.sum() < len(each.mask)
    assert partly_masked >= 30
