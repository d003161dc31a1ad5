"""What the scheduler knows of an attempt, and of each of its sequences once they decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import numpy as np

from pdserve.core.events import FinishReason, Token
from pdserve.core.geometry import KVGeometry
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.prefix_cache import chain_digests, next_digest, root_digest
from pdserve.engine.work import BlockCopy, Group, Sampled, TokenIds


class Phase(Enum):
    """Where an attempt is, and so what it holds.

    WAITING    in the queue: no blocks
    PREFILLING some of the prompt is computed: prompt blocks, and its siblings' own if it decodes here
    PREFILLED  first tokens are out: prompt blocks
    RESERVED   granted: prompt blocks and its siblings' own
    RUNNING    its sequences decode: each holds its blocks
    STOPPED    nothing is computed any more: whatever it held before
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    RESERVED = "reserved"
    RUNNING = "running"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a group in this engine.

    Attributes:
        prefills: the prompt is computed here; otherwise it arrives in a reservation.
        decodes: its sequences go on here after their first token.
        limit: prompt and output tokens of one sibling at most, by its parameters and the model's context.
        live: siblings that have neither ended nor been stopped.
        root: where the chain of digests starts.
        digests: of the full blocks of `group.token_ids`.
        stage_start_s: when the stage that is being measured began.
        slots: places of the batch that it takes.
        cached_tokens: leading tokens that the prefix cache held at its admission.
        entered_blocks: leading blocks of the prompt that have been offered to the prefix cache.
        prompt_block_ids: in order, until its sequences take them over.
        own_block_ids: for each sibling the blocks that it does not share. The original of the prompt's partly filled
            last block is among the prompt's; the first list does without it, the others begin with a copy's place.
        sequences: by sibling, from the fork on; a stopped one stays, for its blocks.
        stepped: whether its sequences have had their first step.
    """

    group: Group
    prefills: bool
    decodes: bool
    limit: int
    live: list[int]
    root: bytes
    digests: list[bytes]
    stage_start_s: float
    phase: Phase = Phase.WAITING
    slots: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    entered_blocks: int = 0
    prompt_block_ids: list[int] = field(default_factory=list)
    own_block_ids: list[list[int]] = field(default_factory=list)
    sequences: "dict[int, RunningSequence]" = field(default_factory=dict)
    stepped: bool = False

    @classmethod
    def of(
        cls, group: Group, geometry: KVGeometry, max_context_tokens: int, *, prefills: bool, decodes: bool, now_s: float
    ) -> Self:
        """An attempt that has just come."""
        root = root_digest(geometry, group.cache_scope)
        return cls(
            group=group,
            prefills=prefills,
            decodes=decodes,
            limit=min(group.max_total_tokens, max_context_tokens),
            live=list(group.siblings),
            root=root,
            digests=chain_digests(root, group.token_ids, geometry.block_size),
            stage_start_s=now_s,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and replayed output."""
        return len(self.group.token_ids)

    @property
    def uncomputed_tokens(self) -> int:
        """What is still to be computed here of prompt and replayed output."""
        return self.num_tokens - self.computed_tokens if self.prefills else 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are computed here."""
        return self.prefills and self.group.params.prompt_logprobs is not None

    @property
    def slots_wanted(self) -> int:
        return len(self.live) if self.decodes else min(1, len(self.live))

    def held_block_ids(self) -> list[int]:
        """Every block that it holds, as often as it holds it."""
        return [
            *self.prompt_block_ids,
            *(block_id for block_ids in self.own_block_ids for block_id in block_ids),
            *(block_id for sequence in self.sequences.values() for block_id in sequence.block_ids),
        ]

    def finish_reason(self, token_id: int, position: int) -> FinishReason | None:
        """Why a sibling ends with this token at this absolute position; None if it goes on."""
        params = self.group.params
        if token_id in params.stop_ids and position - self.group.prompt_tokens >= params.min_tokens:
            return FinishReason.STOP
        if position + 1 >= self.limit:
            return FinishReason.LENGTH
        return None

    def token(self, sibling: int, position: int, result: Sampled) -> Token:
        """What was sampled for a sibling at this absolute position."""
        finish = self.finish_reason(result.token_id, position)
        return Token(self.group.key, sibling, position, result.token_id, finish, result.logprobs)

    def enter_prompt_blocks(self, blocks: BlockManager, block_size: int) -> None:
        """Offer the blocks that have filled since the last call to the prefix cache."""
        full_blocks = self.computed_tokens // block_size
        for index in range(self.entered_blocks, full_blocks):
            blocks.enter(self.prompt_block_ids[index], self.digests[index])
        self.entered_blocks = full_blocks


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sibling that decodes.

    Attributes:
        token_ids: [limit] buffer, of which `num_tokens` are known; all but the last are in the cache.
        block_ids: for all `limit` tokens, in order.
        digest: of the last full block.
        copy: of the prompt's partly filled block, to be made before its first step.
    """

    attempt: Attempt
    sibling: int
    token_ids: TokenIds
    num_tokens: int
    block_ids: list[int]
    digest: bytes
    copy: BlockCopy | None = None

    def enter_filled_block(self, blocks: BlockManager, block_size: int) -> None:
        """After a step all `num_tokens` are in the cache: offer the block that the last one filled, if it filled one."""
        end = self.num_tokens
        if end % block_size == 0:
            self.digest = next_digest(self.digest, self.token_ids[end - block_size : end])
            blocks.enter(self.block_ids[end // block_size - 1], self.digest)


def fork(attempt: Attempt, first_tokens: Sequence[Token], blocks: BlockManager) -> list[RunningSequence]:
    """Turn an attempt's blocks into those of its sequences, one for each first token. What is left over is freed.

    Full prompt blocks are shared. The first sequence goes on in the partly filled one, the others in copies of it.
    """
    num_shared = len(attempt.digests)
    shared, partly_filled = attempt.prompt_block_ids[:num_shared], attempt.prompt_block_ids[num_shared:]
    own_block_ids = [[*partly_filled, *attempt.own_block_ids[0]], *attempt.own_block_ids[1:]]
    attempt.prompt_block_ids, attempt.own_block_ids = [], []
    for token, own in zip(first_tokens, own_block_ids, strict=False):
        token_ids = np.empty(attempt.limit, dtype=np.int32)
        token_ids[: attempt.num_tokens] = attempt.group.token_ids
        token_ids[attempt.num_tokens] = token.token_id
        blocks.hold(shared)
        attempt.sequences[token.sibling] = RunningSequence(
            attempt=attempt,
            sibling=token.sibling,
            token_ids=token_ids,
            num_tokens=attempt.num_tokens + 1,
            block_ids=[*shared, *own],
            digest=attempt.digests[-1] if attempt.digests else attempt.root,
            copy=BlockCopy(partly_filled[0], own[0]) if partly_filled and own[0] != partly_filled[0] else None,
        )
    blocks.free(shared)
    for own in own_block_ids[len(first_tokens) :]:
        blocks.free(own)
    return list(attempt.sequences.values())
