"""Attempts on the wire: their description, and the parts in which their token ids travel."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.core.attempt import Attempt
from pdserve.core.sampling import MAX_SIBLINGS
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.convert import key_from_proto, sampling_from_proto, sampling_to_proto, to_milliseconds, violation

# A 32-bit number takes at most five bytes; the rest of a part, and what wraps it in a command, fits the overhead.
_TOKEN_ID_BYTES = 5
_OVERHEAD_BYTES = 64

_MAX_TOKEN_ID = 2**31 - 1
_MAX_MILLISECONDS = 2**63


def attempt_to_proto(attempt: Attempt) -> session_pb2.Attempt:
    remaining_s = attempt.remaining_s
    return session_pb2.Attempt(
        group=attempt.key.group.counter,
        attempt=attempt.key.attempt,
        siblings=attempt.siblings,
        total_tokens=attempt.total_tokens,
        prompt_tokens=attempt.prompt_tokens,
        sampling=sampling_to_proto(attempt.params),
        seed=attempt.seed,
        model=attempt.model,
        adapter=attempt.adapter,
        cache_scope=attempt.cache_scope,
        age_ms=to_milliseconds(attempt.age_s, _MAX_MILLISECONDS),
        # 0 is no deadline: one that has just passed is still one.
        remaining_ms=0 if remaining_s is None else max(1, to_milliseconds(remaining_s, _MAX_MILLISECONDS)),
        priority=attempt.priority,
    )


def attempt_from_proto(attempt: session_pb2.Attempt, instance: int) -> Attempt:
    """The attempt of the frontend `instance`.

    Raises:
        PdserveError: protocol_violation; a field makes no sense.
        InvalidRequest: a sampling parameter is out of its range.
    """
    key = key_from_proto(instance, attempt.group, attempt.attempt)
    siblings = tuple(attempt.siblings)
    if not siblings or len(set(siblings)) != len(siblings) or max(siblings) >= MAX_SIBLINGS:
        raise violation(f"siblings of {key} must be different numbers below {MAX_SIBLINGS}, at least one")
    if not 0 < attempt.prompt_tokens <= attempt.total_tokens:
        raise violation(f"{key} has {attempt.prompt_tokens} prompt tokens of {attempt.total_tokens} in all")
    return Attempt(
        key=key,
        siblings=siblings,
        prompt_tokens=attempt.prompt_tokens,
        total_tokens=attempt.total_tokens,
        params=sampling_from_proto(attempt.sampling),
        seed=attempt.seed,
        model=attempt.model,
        adapter=attempt.adapter,
        cache_scope=attempt.cache_scope,
        age_s=attempt.age_ms / 1000,
        remaining_s=attempt.remaining_ms / 1000 if attempt.remaining_ms else None,
        priority=attempt.priority,
    )


def prompt_parts(
    group_counter: int, attempt: int, token_ids: Sequence[int] | NDArray[np.int32], max_bytes: int
) -> Iterator[session_pb2.PromptPart]:
    """The token ids in order, in parts that fill a command of `max_bytes` bytes at most. No token ids make no parts."""
    step = max(1, (max_bytes - _OVERHEAD_BYTES) // _TOKEN_ID_BYTES)
    for start in range(0, len(token_ids), step):
        part = token_ids[start : start + step]
        yield session_pb2.PromptPart(
            group=group_counter,
            attempt=attempt,
            token_ids=part.tolist() if isinstance(part, np.ndarray) else part,
        )


class PromptAssembly:
    """Parts of prompts that came on one session and wait for their Run or Reserve."""

    def __init__(self, max_tokens: int, max_parts: int) -> None:
        """Hold at most `max_tokens` token ids in `max_parts` parts, of all prompts together.

        A part takes far more memory than one token id.
        """
        self._max_tokens = max_tokens
        self._max_parts = max_parts
        self._num_tokens = 0
        self._num_parts = 0
        self._parts: dict[tuple[int, int], list[NDArray[np.int32]]] = {}

    @property
    def num_prompts(self) -> int:
        return len(self._parts)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, part: session_pb2.PromptPart) -> None:
        """
        Raises:
            PdserveError: protocol_violation; there are more tokens or parts than may wait, no tokens at all, or one is no
                token id.
        """
        if not part.token_ids:
            raise violation("a part of a prompt without token ids")
        if self._num_tokens + len(part.token_ids) > self._max_tokens:
            raise violation(f"more than {self._max_tokens} tokens of prompts wait for their requests")
        if self._num_parts == self._max_parts:
            raise violation(f"prompts in more than {self._max_parts} parts wait for their requests")
        token_ids = np.array(part.token_ids[:], dtype=np.int64)
        if token_ids.max() > _MAX_TOKEN_ID:
            raise violation(f"{token_ids.max()} is no token id")
        self._parts.setdefault((part.group, part.attempt), []).append(token_ids.astype(np.int32))
        self._num_tokens += len(token_ids)
        self._num_parts += 1

    def take(self, group_counter: int, attempt: int, total_tokens: int) -> NDArray[np.int32]:
        """[total_tokens] the attempt's token ids, which are forgotten here.

        Raises:
            PdserveError: protocol_violation; it isn't `total_tokens` of them that came.
        """
        parts = self._forget(group_counter, attempt)
        count = sum(map(len, parts))
        if count != total_tokens:
            raise violation(f"{count} token ids came for a prompt of {total_tokens}")
        return np.concatenate(parts)

    def drop(self, group_counter: int, attempt: int) -> None:
        """Forget what came for an attempt, if anything did."""
        self._forget(group_counter, attempt)

    def _forget(self, group_counter: int, attempt: int) -> list[NDArray[np.int32]]:
        parts = self._parts.pop((group_counter, attempt), [])
        self._num_tokens -= sum(map(len, parts))
        self._num_parts -= len(parts)
        return parts
