from dataclasses import fields, replace

import pytest

from pdserve.core.geometry import KVGeometry

GEOMETRY = KVGeometry(
    model_fingerprint="abc",
    adapter="",
    dtype="bfloat16",
    codec="raw",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
)


def test_sizes_follow_from_the_shape() -> None:
    assert GEOMETRY.itemsize_bytes == 2
    assert GEOMETRY.token_layer_bytes == 2 * 3 * 64 * 2
    assert GEOMETRY.block_bytes == 2 * 3 * 64 * 2 * 30 * 16
    assert replace(GEOMETRY, dtype="float32").block_bytes == 2 * GEOMETRY.block_bytes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_are_taken_whole(num_tokens: int, num_blocks: int) -> None:
    assert GEOMETRY.blocks_for(num_tokens) == num_blocks


def test_equal_geometries_have_no_differences() -> None:
    assert GEOMETRY.differences(replace(GEOMETRY)) == []


@pytest.mark.parametrize("name", [f.name for f in fields(KVGeometry)])
def test_any_field_makes_a_difference_and_both_sides_are_named(name: str) -> None:
    mine = getattr(GEOMETRY, name)
    theirs = mine + 1 if isinstance(mine, int) else f"other-{mine}"
    assert GEOMETRY.differences(replace(GEOMETRY, **{name: theirs})) == [f"{name}: {mine} / {theirs}"]


def test_every_difference_is_named() -> None:
    other = replace(GEOMETRY, dtype="float16", block_size=256)
    assert GEOMETRY.differences(other) == ["dtype: bfloat16 / float16", "block_size: 16 / 256"]
