"""Who gets blocks and places in the batch, and when.

Attempts wait in one queue, by priority and then by age. The first of it is admitted as soon as all its blocks and places
are there: all of them or none. Until then nobody behind it is admitted: a small young request never overtakes a large old
one, so nobody waits for ever. (What still waits for a peer stays with the runtime, and cannot hold others up here.)

A reservation, and a prompt that goes on to decode, take the blocks for all that they may ever write. So a running sequence
never waits for memory, and nothing is retracted.
"""

from collections import Counter
from collections.abc import Iterable

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from pdserve.core.geometry import KVGeometry
from pdserve.engine.attempt import Attempt, Phase
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.waiting_queue import WaitingQueue

_QUEUE_FULL_RETRY_S = 1.0


class Admission:
    """The queue, and what it waits for."""

    def __init__(
        self, blocks: BlockManager, geometry: KVGeometry, max_context_tokens: int, settings: SchedulerSettings
    ) -> None:
        self.blocks = blocks
        self.queue = WaitingQueue()
        # Whether the first of the queue has reason to hope: something came or was given back since it was last refused.
        self.may_admit = False
        self._geometry = geometry
        self._max_context_tokens = max_context_tokens
        self._settings = settings
        self._slots_taken = 0

    def refusal(self, attempt: Attempt) -> PdserveError | None:
        """Why an attempt can never run here, or why it cannot even wait now."""
        num_tokens = attempt.num_tokens
        if num_tokens == 0:
            return InvalidRequest("prompt", "prompt must have at least one token")
        if num_tokens >= self._max_context_tokens:
            return InvalidRequest(
                "prompt",
                f"This model's maximum context length is {self._max_context_tokens} tokens; the prompt is too long: it has "
                f"{num_tokens}, which leaves no room to answer",
                ErrorCode.context_length_exceeded,
            )
        if num_tokens >= attempt.limit:
            return InvalidRequest("max_tokens", "max_tokens must be above the number of tokens already written")
        if not 1 <= attempt.slots_wanted <= self._settings.max_sequences:
            return InvalidRequest("n", f"n must be from 1 to {self._settings.max_sequences}")
        needed_blocks = self._needed_blocks(attempt)
        if needed_blocks > self.blocks.total_blocks:
            return InvalidRequest(
                "max_tokens" if attempt.decodes else "prompt",
                f"the prompt is too long for the KV cache: {num_tokens} tokens, and up to {attempt.limit - num_tokens} more "
                f"in each of {len(attempt.live)} sequences, need {needed_blocks} blocks; there are "
                f"{self.blocks.total_blocks}",
                ErrorCode.context_length_exceeded,
            )
        if len(self.queue) >= self._settings.max_waiting:
            return PdserveError(
                ErrorCode.queue_full,
                f"{self._settings.max_waiting} requests wait already",
                retry_after_s=_QUEUE_FULL_RETRY_S,
            )
        return None

    def enqueue(self, attempt: Attempt) -> None:
        self.queue.add(attempt)
        self.may_admit = True

    def withdraw(self, attempt: Attempt) -> None:
        self.queue.remove(attempt)
        self.may_admit = True

    def admit(self, attempt: Attempt) -> bool:
        """Give the first of the queue its blocks and places, if all of them are there."""
        block_size, blocks = self._geometry.block_size, self.blocks
        # At least one token is left to compute or to receive: its logits are what comes next. Where those of the whole
        # prompt are wanted, nothing cached helps.
        reusable = [] if attempt.scores_prompt else attempt.digests[: (attempt.num_tokens - 1) // block_size]
        matched = blocks.match(reusable)
        new_blocks = self._needed_blocks(attempt) - len(matched)
        has_places = self._slots_taken + attempt.slots_wanted <= self._settings.max_sequences
        if not has_places or not blocks.can_allocate(new_blocks, matched):
            self.may_admit = False
            return False
        self.queue.remove(attempt)
        self.resize(attempt, attempt.slots_wanted)
        new_block_ids = iter(blocks.allocate(new_blocks, matched))
        prompt_blocks = self._geometry.blocks_for(attempt.num_tokens)
        attempt.prompt_block_ids = [*matched, *(next(new_block_ids) for _ in range(prompt_blocks - len(matched)))]
        if attempt.decodes:
            own_blocks = self._geometry.blocks_for(attempt.limit) - attempt.num_tokens // block_size
            partly_filled = prompt_blocks - attempt.num_tokens // block_size
            for index in range(len(attempt.live)):
                count = own_blocks - (partly_filled if index == 0 else 0)
                attempt.own_block_ids.append([next(new_block_ids) for _ in range(count)])
        attempt.cached_tokens = attempt.computed_tokens = len(matched) * block_size
        attempt.entered_blocks = len(matched)
        return True

    def resize(self, attempt: Attempt, slots: int) -> None:
        """Change how many places of the batch an attempt takes."""
        self._slots_taken += slots - attempt.slots
        attempt.slots = slots
        self.may_admit = True

    def free(self, attempt: Attempt) -> None:
        """Give back every block of an attempt."""
        self.blocks.free(attempt.held_block_ids())
        attempt.prompt_block_ids, attempt.own_block_ids, attempt.sequences = [], [], {}
        self.may_admit = True

    def check(self, attempts: Iterable[Attempt]) -> None:
        """Compare queue, places and blocks with all attempts held; for tests.

        Raises:
            AssertionError: they differ.
        """
        self.blocks.check()
        held = list(attempts)
        held_blocks = Counter(block_id for attempt in held for block_id in attempt.held_block_ids())
        counted = {i: n for i in range(self.blocks.total_blocks) if (n := self.blocks.references(i))}
        if held_blocks != counted:
            raise AssertionError(f"attempts hold {dict(held_blocks)}, the block manager counts {counted}")
        if set(self.queue) != {attempt for attempt in held if attempt.phase is Phase.WAITING}:
            raise AssertionError("the queue is not what waits")
        if self.queue.prompt_tokens != sum(attempt.uncomputed_tokens for attempt in self.queue):
            raise AssertionError(f"the queue counts {self.queue.prompt_tokens} tokens of its prompts")
        if self._slots_taken != sum(attempt.slots for attempt in held):
            raise AssertionError(f"{self._slots_taken} places are taken, attempts have {[a.slots for a in held]}")

    def _needed_blocks(self, attempt: Attempt) -> int:
        """All that it must have at once, those of a cached prefix included."""
        if not attempt.decodes:
            return self._geometry.blocks_for(attempt.num_tokens)
        shared_blocks = attempt.num_tokens // self._geometry.block_size
        return shared_blocks + len(attempt.live) * (self._geometry.blocks_for(attempt.limit) - shared_blocks)
