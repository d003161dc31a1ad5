"""Blocks are free, used or cached; counts always add up; content is found again by its digests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.geometry import KVGeometry
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.prefix_cache import chain_digests, next_digest, root_digest
from tests.calls import count_calls
from tests.geometries import geometry

GEOMETRY = geometry()


def digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def counts(blocks: BlockManager) -> tuple[int, int, int]:
    blocks.check()
    return blocks.free_blocks, blocks.cached_blocks, blocks.used_blocks


def cached_chain(blocks: BlockManager, *names: str) -> list[int]:
    block_ids = blocks.allocate(len(names))
    for block_id, digest in zip(block_ids, digests(*names), strict=True):
        blocks.enter(block_id, digest)
    blocks.free(block_ids)
    return block_ids


def test_allocated_blocks_are_used_until_they_are_freed() -> None:
    blocks = BlockManager(4)
    block_ids = blocks.allocate(3)
    assert len(set(block_ids)) == 3
    assert counts(blocks) == (1, 0, 3)
    blocks.free(block_ids)
    assert counts(blocks) == (4, 0, 0)


def test_more_than_there_is_is_not_allocated_and_nothing_is_taken() -> None:
    blocks = BlockManager(2)
    assert not blocks.can_allocate(3)
    with pytest.raises(ValueError, match="3 blocks asked for"):
        blocks.allocate(3)
    assert counts(blocks) == (2, 0, 0)


def test_a_block_held_twice_is_freed_by_the_second_free() -> None:
    blocks = BlockManager(1)
    block_ids = blocks.allocate(1)
    blocks.hold(block_ids)
    blocks.free(block_ids)
    assert counts(blocks) == (0, 0, 1)
    blocks.free(block_ids)
    assert counts(blocks) == (1, 0, 0)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda blocks: blocks.free([0]),
        lambda blocks: blocks.hold([0]),
        lambda blocks: blocks.enter(0, b"a"),
        lambda blocks: blocks.free([-1]),
        lambda blocks: blocks.hold([9]),
        lambda blocks: blocks.enter(9, b"a"),
        lambda blocks: blocks.references(9),
    ],
)
def test_using_a_free_or_unknown_block_raises(misuse: Callable[[BlockManager], Any]) -> None:
    blocks = BlockManager(2)
    with pytest.raises(ValueError, match="block"):
        misuse(blocks)
    assert counts(blocks) == (2, 0, 0)


def test_a_double_free_of_a_cached_block_raises() -> None:
    blocks = BlockManager(2)
    block_ids = cached_chain(blocks, "a")
    with pytest.raises(ValueError, match="freed twice"):
        blocks.free(block_ids)
    assert counts(blocks) == (1, 1, 0)


def test_an_entered_block_stays_cached_and_is_matched() -> None:
    blocks = BlockManager(4)
    block_ids = cached_chain(blocks, "a", "b")
    assert counts(blocks) == (2, 2, 0)
    assert blocks.match(digests("a", "b", "c")) == block_ids
    assert blocks.match(digests("a", "x", "b")) == block_ids[:1]
    assert blocks.match(digests("x", "a", "b")) == []


def test_matched_blocks_are_held_by_allocate() -> None:
    blocks = BlockManager(3)
    block_ids = cached_chain(blocks, "a", "b")
    # One free block and none that could be evicted: both cached ones are to be kept.
    assert blocks.can_allocate(1, block_ids)
    assert not blocks.can_allocate(2, block_ids)
    new = blocks.allocate(1, block_ids)
    assert counts(blocks) == (0, 0, 3)
    blocks.free([*block_ids, *new])
    assert counts(blocks) == (1, 2, 0)


def test_a_matched_block_that_is_used_costs_nothing() -> None:
    blocks = BlockManager(2)
    block_ids = blocks.allocate(1)
    blocks.enter(block_ids[0], b"a")
    assert blocks.can_allocate(1, blocks.match([b"a"]))
    blocks.allocate(1, blocks.match([b"a"]))
    assert blocks.references(block_ids[0]) == 2


def test_free_blocks_go_before_cached_ones_and_old_cached_ones_before_new() -> None:
    blocks = BlockManager(3)
    old, new = cached_chain(blocks, "old"), cached_chain(blocks, "new")
    free = blocks.allocate(1)
    assert free[0] not in (*old, *new)
    blocks.hold(old)
    blocks.free(old)
    assert blocks.allocate(1) == new
    assert blocks.match([b"new"]) == []
    assert blocks.match([b"old"]) == old


def test_a_chain_is_evicted_from_its_end() -> None:
    blocks = BlockManager(3)
    chain = cached_chain(blocks, "a", "b", "c")
    blocks.allocate(1)
    assert blocks.match(digests("a", "b", "c")) == chain[:2]


def test_the_second_block_with_the_same_content_is_not_cached() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.enter(first, b"a")
    blocks.enter(second, b"a")
    blocks.enter(first, b"a")
    blocks.free([first, second])
    assert counts(blocks) == (1, 1, 0)
    assert blocks.match([b"a"]) == [first]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "hold", "free", "enter"]), st.integers(0, 7), st.integers(0, 5)),
        max_size=60,
    )
)
def test_counts_add_up_after_any_sequence_of_operations(operations: list[tuple[str, int, int]]) -> None:
    blocks = BlockManager(8)
    held: list[int] = []
    for name, index, number in operations:
        match name:
            case "allocate":
                matched = blocks.match([bytes([n]) for n in range(index)])
                if blocks.can_allocate(number, matched):
                    held += [*matched, *blocks.allocate(number, matched)]
            case "hold" if held:
                blocks.hold([held[index % len(held)]])
                held.append(held[index % len(held)])
            case "free" if held:
                blocks.free([held.pop(index % len(held))])
            case "enter" if held:
                blocks.enter(held[index % len(held)], bytes([number]))
        blocks.check()
        assert all(blocks.references(block_id) == held.count(block_id) for block_id in range(8))
    blocks.free(held)
    assert counts(blocks)[2] == 0


def test_the_cost_of_an_operation_does_not_depend_on_the_size_of_the_pool() -> None:
    def calls(total_blocks: int) -> int:
        blocks = BlockManager(total_blocks)
        for index in range(total_blocks):
            cached_chain(blocks, str(index))

        def take_and_give_back() -> None:
            block_ids = blocks.allocate(8, blocks.match(digests("0", "1")))
            blocks.enter(block_ids[0], b"new")
            blocks.free(block_ids)

        return count_calls(take_and_give_back)

    assert calls(16) == calls(4096)


def test_digests_depend_on_every_token_before_the_end_of_their_block() -> None:
    token_ids = np.arange(12, dtype=np.int32)
    chain = chain_digests(b"root", token_ids, 4)
    assert len(chain) == len(chain_digests(b"root", np.arange(15, dtype=np.int32), 4)) == 3
    for changed in range(12):
        other_ids = token_ids.copy()
        other_ids[changed] += 100
        other = chain_digests(b"root", other_ids, 4)
        assert [a == b for a, b in zip(chain, other, strict=True)] == [block < changed // 4 for block in range(3)]


def test_a_chain_goes_on_where_it_ended() -> None:
    token_ids = np.arange(8, dtype=np.int32)
    first, second = chain_digests(b"root", token_ids, 4)
    assert next_digest(first, token_ids[4:]) == second


def test_every_part_of_the_root_counts() -> None:
    def variant(**changes: Any) -> bytes:
        fields = {name: getattr(GEOMETRY, name) for name in GEOMETRY.__slots__}
        return root_digest(KVGeometry(**(fields | changes)), "scope")

    roots = {
        variant(),
        variant(model_fingerprint="g"),
        variant(adapter="a"),
        variant(codec="c"),
        variant(block_size=8),
        variant(dtype="float16"),
        root_digest(GEOMETRY, "other"),
        # Parts are told apart even if their text together is the same.
        variant(adapter="float32", dtype="", codec="raw"),
    }
    assert len(roots) == 8
    assert all(len(root) == 32 for root in roots)
