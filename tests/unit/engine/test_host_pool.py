"""Reads and writes of any token range, against one token at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.interfaces import Bytes
from tests.geometries import geometry

GEOMETRY = geometry(dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=4)
NUM_BLOCKS = 7
TOKEN_BYTES = GEOMETRY.head_dim * GEOMETRY.itemsize_bytes

ranges = st.tuples(st.integers(0, 4 * NUM_BLOCKS), st.integers(0, 4 * NUM_BLOCKS)).map(
    lambda pair: range(*sorted(pair))
)
layer_ranges = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda pair: range(*sorted(pair)))
block_orders = st.permutations(range(NUM_BLOCKS))


def _random_pool() -> HostKVPool:
    pool = HostKVPool(GEOMETRY, NUM_BLOCKS)
    pool.memory[...] = np.random.default_rng(0).integers(0, 256, pool.memory.shape)
    return pool


def _slow_read(pool: HostKVPool, block_ids: list[int], tokens: range, layers: range) -> Bytes:
    out = np.empty((len(layers), 2, GEOMETRY.num_kv_heads, len(tokens), TOKEN_BYTES), np.uint8)
    for i, layer in enumerate(layers):
        for j, token in enumerate(tokens):
            block = block_ids[token // GEOMETRY.block_size]
            out[i, :, :, j] = pool.memory[layer, :, block, :, token % GEOMETRY.block_size]
    return out.reshape(-1)


@given(block_ids=block_orders, tokens=ranges, layers=layer_ranges)
def test_read_gives_tokens_in_canonical_order(block_ids: list[int], tokens: range, layers: range) -> None:
    pool = _random_pool()
    assert np.array_equal(pool.read(block_ids, tokens, layers), _slow_read(pool, block_ids, tokens, layers))


@given(block_ids=block_orders, tokens=ranges, layers=layer_ranges)
def test_write_changes_these_tokens_and_nothing_else(block_ids: list[int], tokens: range, layers: range) -> None:
    pool, everything = _random_pool(), range(4 * NUM_BLOCKS)
    size = GEOMETRY.token_layer_bytes * len(tokens) * len(layers)
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    shape = (3, 2, GEOMETRY.num_kv_heads, 4 * NUM_BLOCKS, TOKEN_BYTES)
    expected = _slow_read(pool, block_ids, everything, range(3)).reshape(shape)
    expected[layers.start : layers.stop, :, :, tokens.start : tokens.stop] = data.reshape(
        len(layers), 2, GEOMETRY.num_kv_heads, len(tokens), TOKEN_BYTES
    )
    pool.write(block_ids, tokens, layers, data)
    assert np.array_equal(_slow_read(pool, block_ids, everything, range(3)).reshape(shape), expected)


def test_read_is_a_copy() -> None:
    pool = _random_pool()
    data = pool.read([2, 1], range(8), range(3))
    before = data.copy()
    pool.memory[...] = 0
    assert np.array_equal(data, before)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_write_refuses_another_number_of_bytes(wrong: int) -> None:
    data = np.zeros(GEOMETRY.token_layer_bytes * 5 * 3 + wrong, np.uint8)
    with pytest.raises(ValueError, match="reshape"):
        _random_pool().write([0, 1], range(5), range(3), data)


def test_copy_block_copies_every_layer() -> None:
    pool = _random_pool()
    pool.copy_block(2, 5)
    assert np.array_equal(pool.memory[:, :, 5], pool.memory[:, :, 2])
