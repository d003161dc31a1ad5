"""Who holds which block of the paged pool, and which unheld blocks are worth keeping.

A block is *free* (holds nothing), *used* (held one or more times) or *cached* (held by nobody, content known by its
digest, and the first to go when free blocks run out: least recently used first). Every operation costs the same for each
block, whatever the size of the pool.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Reference counts, the free list and the prefix cache of one pool. Knows block ids only, no memory.

    Args:
        total_blocks: blocks of the pool, numbered from 0.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._references = [0] * total_blocks
        self._free_block_ids = list(range(total_blocks - 1, -1, -1))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Cached blocks from the least to the most recently used. A plain dict slows down when its front is popped.
        self._cached_block_ids: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        return len(self._free_block_ids)

    @property
    def cached_blocks(self) -> int:
        return len(self._cached_block_ids)

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks - self.cached_blocks

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks whose content is known, as far as an unbroken chain from the first goes. Holds nothing yet."""
        block_ids = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, num_blocks: int, matched: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` new blocks are there, when the matched ones are kept."""
        kept = sum(self._references[block_id] == 0 for block_id in matched)
        return num_blocks <= self.free_blocks + self.cached_blocks - kept

    def allocate(self, num_blocks: int, matched: Sequence[int] = ()) -> list[int]:
        """Hold the matched blocks once more, and take new ones; returns the new ones, each held once.

        Raises:
            ValueError: there are not enough (see `can_allocate`); nothing has been taken.
        """
        if not self.can_allocate(num_blocks, matched):
            raise ValueError(
                f"{num_blocks} blocks asked for, {self.free_blocks} free, {self.cached_blocks} cached, "
                f"{len(matched)} matched"
            )
        self.hold(matched)
        return [self._take() for _ in range(num_blocks)]

    def hold(self, block_ids: Sequence[int]) -> None:
        """Hold used or cached blocks once more.

        Raises:
            ValueError: a block is free or unknown.
        """
        for block_id in block_ids:
            self._check_known(block_id)
            if self._references[block_id] == 0:
                if block_id not in self._cached_block_ids:
                    raise ValueError(f"block {block_id} is free and cannot be held")
                del self._cached_block_ids[block_id]
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give each block back once. The last ones go first, so that a chain is evicted from its end.

        Raises:
            ValueError: a block is unknown or held by nobody.
        """
        for block_id in reversed(block_ids):
            self._check_known(block_id)
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is freed twice")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id in self._digest_of:
                    self._cached_block_ids[block_id] = None
                else:
                    self._free_block_ids.append(block_id)

    def enter(self, block_id: int, digest: bytes) -> None:
        """Make a full, held block's content known. No effect if a block with this content is known already.

        Raises:
            ValueError: the block is unknown or held by nobody.
        """
        self._check_known(block_id)
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is held by nobody and cannot be entered")
        if digest not in self._block_of and block_id not in self._digest_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def references(self, block_id: int) -> int:
        """How many times a block is held."""
        self._check_known(block_id)
        return self._references[block_id]

    def check(self) -> None:
        """Walk the whole pool and compare it with every table; for tests.

        Raises:
            AssertionError: free, cached and used blocks are not exactly the pool's.
        """
        free = set(self._free_block_ids)
        cached = set(self._cached_block_ids)
        used = {block_id for block_id, count in enumerate(self._references) if count > 0}
        problems = []
        if len(free) != len(self._free_block_ids):
            problems.append("a block is in the free list twice")
        if len(free) + len(cached) + len(used) != self.total_blocks or free | cached | used != set(
            range(self.total_blocks)
        ):
            problems.append(f"free {len(free)} + cached {len(cached)} + used {len(used)} is not {self.total_blocks}")
        if {digest: block_id for block_id, digest in self._digest_of.items()} != self._block_of:
            problems.append("digests and blocks do not map to each other")
        if not cached <= self._digest_of.keys():
            problems.append("a cached block has no digest")
        if free & self._digest_of.keys():
            problems.append("a free block has a digest")
        if problems:
            raise AssertionError("; ".join(problems))

    def _take(self) -> int:
        if self._free_block_ids:
            block_id = self._free_block_ids.pop()
        else:
            block_id, _ = self._cached_block_ids.popitem(last=False)
            del self._block_of[self._digest_of.pop(block_id)]
        self._references[block_id] = 1
        return block_id

    def _check_known(self, block_id: int) -> None:
        if not 0 <= block_id < self.total_blocks:
            raise ValueError(f"block {block_id} is not in a pool of {self.total_blocks}")
