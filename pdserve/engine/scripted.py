"""A model runner without a model: real bytes in the pool, scripted tokens, scripted step times, no torch.

A token's keys and values are a function of all tokens up to it, and the next token is a function of every byte of the
sequence's cache, read back from the pool. So an answer is right only if each block was computed, shared, copied and
transferred as it should be, and `scripted_answer` says what right is without a pool. An answer that echoes its prompt
reads the prompt's ids back from the cache, too: each is what one position's state has more than the last.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.core.events import TokenLogprobs
from pdserve.core.geometry import KVGeometry
from pdserve.core.randomness import uniform
from pdserve.core.sampling import SamplingParams
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.interfaces import Bytes
from pdserve.engine.work import BlockCopy, Sampled, SampleSpec, SequenceSlice, TokenIds

_Words = NDArray[np.uint64]

# Any odd numbers do; these are well-mixing ones (Knuth's MMIX multiplier, and splitmix64's, Steele et al. 2014).
_STATE_MULTIPLIER = 6364136223846793005
_WORD_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD_BYTES = 8

SCRIPTED_GEOMETRY = KVGeometry(
    model_fingerprint="scripted",
    adapter="",
    dtype="float16",
    codec="raw",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a scripted runner pretends to be.

    Attributes:
        first_token_id, num_token_ids: the range of token ids that answers are made of. The default is a range of
            printable ASCII words of SmolLM2's vocabulary.
        answer_tokens: an answer of so many tokens ends by a stop id, if the request has one; None never ends so.
        echo: an answer repeats the prompt's tokens, and then ends by a stop id, or begins again if there is none.
        step_s: duration of a step, beside prefill_token_s for each token of a prompt and decode_row_s for each sequence
            that decodes.
    """

    vocab_size: int = 49152
    max_context_tokens: int = 8192
    first_token_id: int = 1928
    num_token_ids: int = 400
    answer_tokens: int | None = None
    echo: bool = False
    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.num_token_ids <= self.vocab_size - self.first_token_id:
            raise ValueError("first_token_id and num_token_ids must name a range of the vocabulary")

    def step_duration_s(self, slices: Sequence[SequenceSlice]) -> float:
        decode_rows = sum(_is_decode_row(part) for part in slices)
        prompt_tokens = sum(len(part.token_ids) for part in slices if not _is_decode_row(part))
        return self.step_s + decode_rows * self.decode_row_s + prompt_tokens * self.prefill_token_s


DEFAULT_SCRIPT = Script()


class ScriptedRunner:
    """See `ModelRunner`.

    Args:
        num_blocks: size of the pool.
        geometry: of the pool; a head's bytes are a multiple of 8.
    """

    def __init__(
        self, num_blocks: int, script: Script = DEFAULT_SCRIPT, geometry: KVGeometry = SCRIPTED_GEOMETRY
    ) -> None:
        if geometry.head_dim * geometry.itemsize_bytes % _WORD_BYTES:
            raise ValueError(f"a scripted head must have a multiple of {_WORD_BYTES} bytes")
        self.geometry = geometry
        self.pool = HostKVPool(geometry, num_blocks)
        self.vocab_size = script.vocab_size
        self.max_context_tokens = script.max_context_tokens
        self.script = script

    def run(
        self,
        slices: Sequence[SequenceSlice],
        copies: Sequence[BlockCopy],
        on_layers: Callable[[int], None] | None = None,
    ) -> list[list[Sampled]]:
        """See `ModelRunner.run`. Sleeps for what the script says that computing takes, in equal parts before layers."""
        num_layers = self.geometry.num_layers
        layer_s = self.script.step_duration_s(slices) / num_layers
        for copy in copies:
            self.pool.copy_block(copy.source, copy.target)
        computed = [self._compute(part) for part in slices]
        for layer in range(num_layers):
            if layer_s > 0:
                time.sleep(layer_s)
            for part, kv in zip(slices, computed, strict=True):
                self.pool.write(part.block_ids, range(part.start, part.end), range(layer, layer + 1), kv[layer])
            if on_layers is not None:
                on_layers(layer + 1)
        return [[*self._score(part), *(self._sample(part, spec) for spec in part.samples)] for part in slices]

    def _compute(self, part: SequenceSlice) -> Bytes:
        """[layers, bytes] of the slice's tokens."""
        state = 0
        if part.start > 0:
            previous = self.pool.read(part.block_ids, range(part.start - 1, part.start), range(1))
            state = int.from_bytes(previous[:_WORD_BYTES].tobytes(), "little")
        return _encode(_states(part.token_ids, state), self.geometry).reshape(self.geometry.num_layers, -1)

    def _score(self, part: SequenceSlice) -> list[Sampled]:
        scores = part.scores
        if scores is None:
            return []
        token_ids: list[int] = scores.token_ids.tolist()
        return [Sampled(token_id, _logprobs(token_id, scores.top_logprobs, self.script)) for token_id in token_ids]

    def _sample(self, part: SequenceSlice, spec: SampleSpec) -> Sampled:
        kv = self.pool.read(part.block_ids, range(spec.position), range(self.geometry.num_layers))
        token_id = _choose(
            kv,
            spec.params,
            spec.seed,
            spec.sibling,
            spec.position,
            spec.prompt_tokens,
            script=self.script,
            geometry=self.geometry,
        )
        return Sampled(token_id, _logprobs(token_id, spec.params.top_logprobs, self.script))


def scripted_kv(token_ids: TokenIds, geometry: KVGeometry = SCRIPTED_GEOMETRY) -> Bytes:
    """[bytes] of these tokens from position 0 on, all layers, in canonical order: what a right pool reads."""
    return _encode(_states(token_ids, 0), geometry)


def scripted_token(
    token_ids: TokenIds,
    prompt_tokens: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    sibling: int = 0,
    script: Script = DEFAULT_SCRIPT,
    geometry: KVGeometry = SCRIPTED_GEOMETRY,
) -> int:
    """The token after `token_ids` (prompt and output so far): what a scripted runner says if its pool is right."""
    kv = scripted_kv(token_ids, geometry)
    return _choose(kv, params, seed, sibling, len(token_ids), prompt_tokens, script=script, geometry=geometry)


def scripted_answer(
    prompt_ids: Sequence[int] | TokenIds,
    params: SamplingParams,
    *,
    seed: int = 0,
    sibling: int = 0,
    script: Script = DEFAULT_SCRIPT,
    geometry: KVGeometry = SCRIPTED_GEOMETRY,
) -> list[int]:
    """All output tokens that a right answer has, the stop id included."""
    prompt_tokens = len(prompt_ids)
    token_ids = np.asarray(prompt_ids, np.int32)
    for _ in range(min(params.max_tokens, script.max_context_tokens - prompt_tokens)):
        token_id = scripted_token(
            token_ids, prompt_tokens, params, seed=seed, sibling=sibling, script=script, geometry=geometry
        )
        token_ids = np.append(token_ids, np.int32(token_id))
        if token_id in params.stop_ids and len(token_ids) - prompt_tokens > params.min_tokens:
            break
    return [int(token_id) for token_id in token_ids[prompt_tokens:]]


def _is_decode_row(part: SequenceSlice) -> bool:
    return len(part.token_ids) == 1 and bool(part.samples) and part.start >= part.samples[0].prompt_tokens


def _states(token_ids: TokenIds, state: int) -> _Words:
    """[tokens] a rolling hash of every token up to each position."""
    states = np.empty(len(token_ids), np.uint64)
    for index, token_id in enumerate(token_ids.tolist()):
        state = (state * _STATE_MULTIPLIER + token_id + 1) & 0xFFFF_FFFF_FFFF_FFFF
        states[index] = state
    return states


def _encode(states: _Words, geometry: KVGeometry) -> Bytes:
    """[bytes] in canonical order: each word its own mixture of the position's state; the first is the state itself."""
    head_words = geometry.head_dim * geometry.itemsize_bytes // _WORD_BYTES
    shape = (geometry.num_layers, 2, geometry.num_kv_heads, 1, head_words)
    numbers = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    words = states[:, None] + numbers * _WORD_STRIDE
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    words ^= words >> np.uint64(31)
    words[0, 0, 0, :, 0] = states
    kv: Bytes = words.astype("<u8", copy=False).reshape(-1).view(np.uint8)
    return kv


def _token_at(kv: Bytes, position: int, geometry: KVGeometry) -> int:
    """The token that made the state at `position`: see `_states`."""
    head_words = geometry.head_dim * geometry.itemsize_bytes // _WORD_BYTES
    states = kv.view("<u8").reshape(geometry.num_layers, 2, geometry.num_kv_heads, -1, head_words)[0, 0, 0, :, 0]
    previous = int(states[position - 1]) if position > 0 else 0
    return (int(states[position]) - previous * _STATE_MULTIPLIER - 1) & 0xFFFF_FFFF_FFFF_FFFF


def _choose(
    kv: Bytes,
    params: SamplingParams,
    seed: int,
    sibling: int,
    position: int,
    prompt_tokens: int,
    *,
    script: Script,
    geometry: KVGeometry,
) -> int:
    """The token at `position`, given the cache of everything before it."""
    num_output_tokens = position - prompt_tokens
    ends = script.answer_tokens is not None and num_output_tokens + 1 >= script.answer_tokens
    ends |= script.echo and num_output_tokens >= prompt_tokens
    if ends and params.stop_ids and num_output_tokens >= params.min_tokens:
        return min(params.stop_ids)
    if script.echo:
        return _token_at(kv, num_output_tokens % prompt_tokens, geometry) % script.vocab_size
    choice = zlib.crc32(kv.data)
    if not params.greedy:
        choice += int(uniform(seed, sibling, position) * 2**32)
    return script.first_token_id + choice % script.num_token_ids


def _logprobs(token_id: int, count: int | None, script: Script) -> TokenLogprobs | None:
    if count is None:
        return None
    ranks = range(count)
    return TokenLogprobs(
        logprob=-1.0,
        top_ids=tuple((token_id + rank) % script.vocab_size for rank in ranks),
        top_logprobs=tuple(-1.0 - rank for rank in ranks),
    )
