"""Where a request goes: pure functions of the last pulses and of what this frontend has dispatched since."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from pdserve.core.events import EngineLoad

# Tokens at the start of a prompt that decide where its cache is likely to be.
AFFINITY_TOKENS = 256
# A worker that a prompt's cache is likely to be on may be so much busier than the average before it is passed over.
_LOAD_BOUND = 1.25

T = TypeVar("T")
Pick = Callable[[int], int]
"""A random number below its argument."""


class Dispatched(NamedTuple):
    """What a worker was given since its last pulse."""

    sequences: int = 0
    tokens: int = 0
    blocks: int = 0


class Candidate(NamedTuple):
    """A worker that may take new work.

    Attributes:
        name: the worker's id, the same in all its lives.
        since: what it was given after the pulse that `load` comes from.
    """

    name: str
    load: EngineLoad
    since: Dispatched

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + self.since.tokens

    def wait_s(self, prompt_tokens: int) -> float:
        """How long a prompt would take here, queue included; in tokens where the speed is not yet known."""
        return (self.queued_tokens + prompt_tokens) / (self.load.tokens_per_s or 1.0)

    def free_blocks_after(self, blocks: int) -> int:
        return self.load.free_blocks + self.load.cached_blocks - self.since.blocks - blocks

    @property
    def sequences(self) -> int:
        return self.load.running_sequences + self.load.queued_sequences + self.since.sequences


def affinity_of(token_ids: Sequence[int], block_size: int, cache_scope: str) -> bytes:
    """A name for a prompt's leading whole blocks; empty if it has none."""
    whole = min(len(token_ids) - 1, AFFINITY_TOKENS) // block_size * block_size
    if whole <= 0:
        return b""
    digest = blake2b(cache_scope.encode(), digest_size=16)
    digest.update(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids[:whole]))
    return digest.digest()


def choose_prefill(candidates: Sequence[Candidate], prompt_tokens: int, affinity: bytes, pick: Pick) -> Candidate:
    """The worker that likely holds the prompt's prefix, unless it is too busy; else the shorter wait of two random ones.

    Prompts with one affinity share a favourite by rendezvous hashing, so a worker that comes or goes moves only its own;
    the bound on its load is that of consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018).

    Args:
        candidates: at least one.
    """
    if affinity:
        favourite = max(candidates, key=lambda candidate: _rendezvous(candidate.name, affinity))
        average_tokens = sum(candidate.queued_tokens for candidate in candidates) / len(candidates)
        if favourite.queued_tokens <= _LOAD_BOUND * average_tokens + prompt_tokens:
            return favourite
    return min(_two_of(candidates, pick), key=lambda candidate: candidate.wait_s(prompt_tokens))


def choose_decode(candidates: Sequence[Candidate], blocks: int, pick: Pick) -> Candidate:
    """Of two random workers the one with room, then with fewer sequences, then with more free blocks.

    Args:
        candidates: at least one.
        blocks: what the request will reserve.
    """

    def cost(candidate: Candidate) -> tuple[bool, int, int]:
        free_blocks = candidate.free_blocks_after(blocks)
        return (free_blocks < 0, candidate.sequences, -free_blocks)

    return min(_two_of(candidates, pick), key=cost)


def _two_of(candidates: Sequence[T], pick: Pick) -> Sequence[T]:
    if len(candidates) <= 2:
        return candidates
    first = pick(len(candidates))
    second = pick(len(candidates) - 1)
    return (candidates[first], candidates[second + (second >= first)])


def _rendezvous(name: str, affinity: bytes) -> bytes:
    return blake2b(name.encode(), key=affinity, digest_size=8).digest()
