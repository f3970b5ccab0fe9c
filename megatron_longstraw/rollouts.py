"""Rollout groups, read from JSONL and checked before a token reaches the model.

A line is one whole group (it has "responses"), or one sample; consecutive samples with one group_id are one
group. Invariants, which tests/test_rollouts.py asserts by these numbers:

1. One group is in memory at a time; the group of a line is yielded before the next line is read.
2. Every per-token array of a response is as long as its ids.
3. Nothing is ignored or repaired: an unknown key, a key given twice, a number that is not finite, a list of
   another length are errors with file, line and field. null is the same as a key that is absent.
4. A group_id names one group of the file.
5. No id is special. Whether a token is trained is decided by "train" and "loss_mask" alone.

Texts are tokenised one by one, without special tokens: the prompt, each response, each segment.
"""

import hashlib
import itertools
import json
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_longstraw.config import ConfigError

__all__ = ["Response", "RolloutError", "RolloutGroup", "Tokenizer", "load_tokenizer", "read_groups"]

_SHARED_KEYS = ("group_id", "prompt", "prompt_ids", "temperature", "meta")
_TOKEN_KEYS = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantage")
_RESPONSE_KEYS = ("ids", "text", "segments", "reward", "truncated", *_TOKEN_KEYS)
_SAMPLE = 'a sample (a line without "responses")'
_KEYS = {
    "a group": (*_SHARED_KEYS, "responses"),
    _SAMPLE: (*_SHARED_KEYS, *_RESPONSE_KEYS),
    "a response": _RESPONSE_KEYS,
    "a segment": ("text", "ids", "train"),
}

_Test = Callable[[Any], bool]
_LOG_PROB_SLACK = 1e-3  # what rounding may put above log(1)


class RolloutError(ValueError):
    """A rollout file that can't be used: ``FILE:LINE: FIELD: what was got, what is needed``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One sampled response of n tokens; n may be 0."""

    ids: np.ndarray
    """Token ids, int64 [n]."""
    mask: np.ndarray
    """bool [n]: True where the token is trained, False where it is context only (tool output)."""
    reward: float
    """Reward of the whole response."""
    truncated: bool = False
    """The response was cut off by a length limit."""
    rollout_log_probs: np.ndarray | None = None
    """Log-probabilities by the engine that sampled the response, float64 [n]."""
    old_log_probs: np.ndarray | None = None
    """Log-probabilities by the policy before the step, float64 [n]."""
    ref_log_probs: np.ndarray | None = None
    """Log-probabilities by the reference model, float64 [n]."""
    advantages: np.ndarray | None = None
    """The file's own advantages, float64 [n]; one number is spread over the tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutGroup:
    """One prompt and the responses sampled for it."""

    group_id: str
    """Unique in the file."""
    prompt_ids: np.ndarray
    """Token ids, int64 [P], P >= 1."""
    responses: tuple[Response, ...]
    """At least one."""
    temperature: float
    """Sampling temperature, > 0."""
    meta: Mapping[str, Any] | None
    """Whatever the file says under "meta", unread."""
    source: str
    """``FILE:LINE`` where the group starts, for errors that are found later."""


class Tokenizer(Protocol):
    """What `read_groups` needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added; ValueError where it can't be encoded."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""


def load_tokenizer(name: str) -> Tokenizer:
    """Makes the tokenizer that ``data.tokenizer`` names; nothing is ever downloaded.

    Args:
        name: "bytes", or the path of a HuggingFace tokenizer.json or of a folder that holds one.

    Raises:
        ConfigError: there is no such file, or it is not a tokenizer.
    """
    if name == "bytes":
        return _ByteTokenizer()
    path = Path(name)
    try:
        return _JsonTokenizer(path / "tokenizer.json" if path.is_dir() else path)
    except Exception as error:  # the tokenizers library raises nothing narrower
        needed = 'needs "bytes", or the path of a tokenizer.json or of a folder that holds one'
        raise ConfigError(f"data.tokenizer={name!r}: got {error}, {needed}") from error


class _ByteTokenizer:
    """A text's UTF-8 bytes are its ids."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        invalid = 0xFF  # never part of UTF-8: shown as U+FFFD, as ids beyond a byte should be
        return bytes(i if 0 <= i < 256 else invalid for i in ids).decode("utf-8", errors="replace")


class _JsonTokenizer:
    """A tokenizer.json, read by HuggingFace's tokenizers."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The file may ask for either, and then ids would be lost or made up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ValueError(str(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_groups(
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    temperature: float = 1.0,
    max_prompt_tokens: int | None = None,
    require_ref_log_probs: bool = False,
) -> Iterator[RolloutGroup]:
    """Reads the groups of a JSONL file, lazily and in its order.

    Args:
        path: the file; a FIFO will do.
        tokenizer: makes ids of texts; not called for what the file gives as ids.
        vocab_size: of the model; every id must be below it.
        temperature: of groups that don't give their own.
        max_prompt_tokens: longer prompts keep their last this many tokens, after all of them were checked.
        require_ref_log_probs: refuse a response of one token or more that has no ref_logprobs.

    Raises:
        RolloutError: on iteration, where the file can't be read, breaks its form, or holds no group.
        ValueError: max_prompt_tokens is not positive.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(f"max_prompt_tokens={max_prompt_tokens}: needs an integer >= 1, or None")
    return _Reader(tokenizer, vocab_size, temperature, max_prompt_tokens, require_ref_log_probs).groups(path)


@dataclass(frozen=True)
class _Object:
    """A JSON object and its place, so that an error can always say where."""

    where: str  # FILE:LINE
    path: str  # what stands before a key in a field's name: "responses[2]."
    tree: dict[str, Any]

    def error(self, key: str, text: str) -> RolloutError:
        return RolloutError(f"{self.where}: {self.path}{key}: {text}")

    def wrong(self, key: str, needed: str) -> RolloutError:
        got = f"got {_short(self.tree[key])}" if key in self.tree else "missing"
        return self.error(key, f"{got}, needs {needed}")

    def check_keys(self, of: str) -> None:
        for key in self.tree:
            if key not in _KEYS[of]:
                raise self.error(_short(key), f"unknown key; the keys of {of} are {', '.join(_KEYS[of])}")

    def one_of(self, *keys: str) -> str:
        """The one key of these that is given."""
        given = [key for key in keys if self.tree.get(key) is not None]
        if len(given) != 1:
            raise self.error("|".join(keys), f"got {' and '.join(given) or 'none'}, needs exactly one of them")
        return given[0]

    def get(self, key: str, fine: _Test, needed: str) -> Any:
        value = self.tree.get(key)
        if not fine(value):
            raise self.wrong(key, needed)
        return value

    def optional(self, key: str, fine: _Test, needed: str) -> Any:
        return None if self.tree.get(key) is None else self.get(key, fine, needed)

    def text(self, key: str, needed: str = "a text") -> str:
        value = self.get(key, lambda value: isinstance(value, str), needed)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            lone = f"the lone surrogate {value[error.start]!r} at character {error.start}"
            raise self.error(key, f"got {lone}, needs valid Unicode") from None
        return value

    def items(self, key: str, fine: _Test, needed: str) -> list[Any]:
        """A list, every item of which is fine."""
        values = self.get(key, lambda value: isinstance(value, list), "a list")
        bad = next((index for index, value in enumerate(values) if not fine(value)), None)
        if bad is not None:
            raise self.error(f"{key}[{bad}]", f"got {_short(values[bad])}, needs {needed}")
        return values

    def per_token(self, key: str, tokens: int, fine: _Test, needed: str, dtype: type = float) -> np.ndarray | None:
        """A list as long as the response, as an array; None where it is not given."""
        if self.tree.get(key) is None:
            return None
        values = self.items(key, fine, needed)
        if len(values) != tokens:
            raise self.error(key, f"got {len(values)} values, needs one for each of the response's {tokens} tokens")
        return np.array(values, dtype=dtype)

    def objects(self, key: str, of: str) -> Iterator["_Object"]:
        """The objects of a list, each checked for unknown keys."""
        for index, tree in enumerate(self.items(key, lambda value: isinstance(value, dict), "an object")):
            child = _Object(self.where, f"{self.path}{key}[{index}].", tree)
            child.check_keys(of)
            yield child

    def group_id(self) -> str:
        value = self.tree.get("group_id")
        return str(value) if type(value) is int else self.text("group_id", "a text or an integer")

    def meta(self) -> Mapping[str, Any] | None:
        return self.optional("meta", lambda value: isinstance(value, dict), "an object")


@dataclass(frozen=True)
class _Reader:
    """Makes groups of checked lines; the fields are the arguments of `read_groups`."""

    tokenizer: Tokenizer
    vocab_size: int
    temperature: float
    max_prompt_tokens: int | None
    require_ref_log_probs: bool

    def groups(self, path: str | Path) -> Iterator[RolloutGroup]:
        seen: set[bytes] = set()  # 64-bit hashes: a file may have more ids than should be kept
        for _, lines in itertools.groupby(_read_lines(path), key=_merge_key):
            group = self._group(lines)
            digest = hashlib.blake2b(group.group_id.encode("utf-8"), digest_size=8).digest()
            if digest in seen:
                got = f"got {_short(group.group_id)}, which an earlier group has"
                needed = "needs an id of its own (the samples of a group stand on consecutive lines)"
                raise RolloutError(f"{group.source}: group_id: {got}, {needed}")
            seen.add(digest)
            yield group
        if not seen:
            raise RolloutError(f"{path}: got no groups, needs at least one line with a JSON object")

    def _group(self, lines: Iterator[_Object]) -> RolloutGroup:
        first = next(lines)
        whole = "responses" in first.tree
        first.check_keys("a group" if whole else _SAMPLE)
        prompt = self._prompt(first)
        samples = first.objects("responses", "a response") if whole else self._samples(first, lines, prompt)
        responses = tuple(self._response(sample) for sample in samples)
        if not responses:
            raise first.wrong("responses", "at least one response")
        kept = prompt if self.max_prompt_tokens is None else prompt[-self.max_prompt_tokens :]
        return RolloutGroup(
            group_id=first.group_id(),
            prompt_ids=np.array(kept, dtype=np.int64),
            responses=responses,
            temperature=self._temperature(first),
            meta=first.meta(),
            source=first.where,
        )

    def _samples(self, first: _Object, rest: Iterator[_Object], prompt: list[int]) -> Iterator[_Object]:
        """The lines of one group, those after the first checked to say the same of the group."""
        yield first
        for line in rest:
            line.check_keys(_SAMPLE)
            same = {
                line.one_of("prompt", "prompt_ids"): self._same_prompt(line, first, prompt),
                "temperature": self._temperature(line) == self._temperature(first),
                "meta": line.meta() in (None, first.meta()),
            }
            for key, equal in same.items():
                if not equal:
                    group = f"group {_short(first.group_id())}"
                    raise line.error(key, f"differs from {first.where}, needs the same in every sample of {group}")
            yield line

    def _prompt(self, line: _Object) -> list[int]:
        key = line.one_of("prompt", "prompt_ids")
        ids = self._tokens(line, key)
        if not ids:
            raise line.wrong(key, "a prompt of at least 1 token")
        return ids

    def _same_prompt(self, line: _Object, first: _Object, prompt: list[int]) -> bool:
        """Compares texts as texts, so that a group's prompt is tokenised once; all else as ids."""
        key = line.one_of("prompt", "prompt_ids")
        if key == first.one_of("prompt", "prompt_ids") == "prompt":
            return line.text(key) == first.text(key)
        return self._prompt(line) == prompt

    def _temperature(self, line: _Object) -> float:
        value = line.optional("temperature", lambda value: _is_number(value) and value > 0, "a finite number > 0")
        return self.temperature if value is None else float(value)

    def _response(self, sample: _Object) -> Response:
        ids, mask = self._tokens_and_mask(sample)
        ref_log_probs = _log_probs(sample, "ref_logprobs", len(ids))
        if self.require_ref_log_probs and len(ids) and ref_log_probs is None:
            raise sample.error("ref_logprobs", "missing, needs one per token: objective.kl_coef > 0 uses them")
        return Response(
            ids=ids,
            mask=mask,
            reward=float(sample.get("reward", _is_number, "a finite number")),
            truncated=bool(sample.optional("truncated", _is_bool, "true or false")),
            rollout_log_probs=_log_probs(sample, "rollout_logprobs", len(ids)),
            old_log_probs=_log_probs(sample, "old_logprobs", len(ids)),
            ref_log_probs=ref_log_probs,
            advantages=_advantages(sample, len(ids)),
        )

    def _tokens_and_mask(self, sample: _Object) -> tuple[np.ndarray, np.ndarray]:
        key = sample.one_of("ids", "text", "segments")
        if key != "segments":
            ids = self._tokens(sample, key)
            trained = [True] * len(ids)
        else:
            ids, trained = [], []
            for segment in sample.objects(key, "a segment"):
                part = self._tokens(segment, segment.one_of("ids", "text"))
                ids += part
                trained += [segment.get("train", _is_bool, "true or false")] * len(part)
        mask = np.array(trained, dtype=bool)
        given = sample.per_token("loss_mask", len(ids), _is_mask, "0, 1, true or false", bool)
        return np.array(ids, dtype=np.int64), mask if given is None else mask & given

    def _tokens(self, source: _Object, key: str) -> list[int]:
        """The ids that a field gives, or that its text has."""
        size = self.vocab_size
        needed = f"an integer id from 0 to {size - 1} (vocab_size={size})"
        if key in ("ids", "prompt_ids"):
            return source.items(key, lambda value: type(value) is int and 0 <= value < size, needed)
        text = source.text(key)
        try:
            ids = self.tokenizer.encode(text)
        except ValueError as error:
            raise source.error(key, f"the tokenizer can't encode it: {error}") from error
        bad = next((index for index, value in enumerate(ids) if not 0 <= value < size), None)
        if bad is not None:
            raise source.error(key, f"got id {ids[bad]} as token {bad} from the tokenizer, needs {needed}")
        return ids


def _read_lines(path: str | Path) -> Iterator[_Object]:
    """The objects of a file's lines, one at a time; blank lines are skipped."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                if not line.isspace():
                    yield _Object(where, "", _parse(where, line))
    except OSError as error:
        raise RolloutError(f"{path}: can't be read: {error.strerror}") from error


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(line.rstrip().decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise RolloutError(f"{where}: byte {error.start + 1}: got {error.reason}, needs UTF-8") from None
    except json.JSONDecodeError as error:
        raise RolloutError(f"{where}: column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise RolloutError(f"{where}: line: too deeply nested, needs the objects of a group or a sample") from None
    except ValueError as error:  # a key given twice, or an integer of thousands of digits
        raise RolloutError(f"{where}: {error}") from None
    if not isinstance(tree, dict):
        raise RolloutError(f"{where}: line: got {_short(tree)}, needs a JSON object")
    return tree


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"{_short(key)}: got the key twice in one object, needs it once")
        tree[key] = value
    return tree


def _merge_key(line: _Object) -> tuple[str | None, str]:
    """Equal for the lines of one group: samples by their id, a group line like no other."""
    return line.where if "responses" in line.tree else None, line.group_id()


def _log_probs(sample: _Object, key: str, tokens: int) -> np.ndarray | None:
    return sample.per_token(key, tokens, _is_log_prob, "a finite log-probability, which can't be positive")


def _advantages(sample: _Object, tokens: int) -> np.ndarray | None:
    value = sample.tree.get("advantage")
    if value is None or isinstance(value, list):
        return sample.per_token("advantage", tokens, _is_number, "a finite number")
    return np.full(tokens, sample.get("advantage", _is_number, "a finite number, or a list of them"), dtype=float)


def _is_number(value: Any) -> bool:
    """A finite JSON number; an integer that overflows float64 is not."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_log_prob(value: Any) -> bool:
    return _is_number(value) and value <= _LOG_PROB_SLACK


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mask(value: Any) -> bool:
    return type(value) in (bool, int) and value in (0, 1)


_SHORT = reprlib.Repr(maxstring=60)


def _short(value: Any) -> str:
    """A repr of at most 60 characters, made without the whole one: the value may be a million tokens."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
