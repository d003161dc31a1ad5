"""The GPU's pool holds what the host's pool holds, byte for byte."""

import numpy as np
import pytest
import torch

from pdserve.engine.cuda_pool import CudaKVPool
from pdserve.engine.host_pool import HostKVPool
from tests.geometries import geometry

pytestmark = pytest.mark.gpu
GEOMETRY = geometry(dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=64, block_size=256)
BLOCKS = [3, 0, 2]


@pytest.mark.parametrize("tokens", [range(1), range(256), range(255, 257), range(100, 700), range(768)])
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
def test_bytes_come_back_as_from_the_host_pool(tokens: range, layers: range) -> None:
    device, host = CudaKVPool(GEOMETRY, 4, torch.device("cuda")), HostKVPool(GEOMETRY, 4)
    data = np.random.default_rng(0).integers(0, 256, GEOMETRY.token_layer_bytes * 768 * 3, np.uint8)
    for pool in (device, host):
        pool.write(BLOCKS, range(768), range(3), data)
    assert np.array_equal(device.read(BLOCKS, tokens, layers), host.read(BLOCKS, tokens, layers))


def test_a_part_is_written_and_nothing_else() -> None:
    device, host = CudaKVPool(GEOMETRY, 4, torch.device("cuda")), HostKVPool(GEOMETRY, 4)
    tokens, layers = range(200, 300), range(1, 3)
    data = np.random.default_rng(1).integers(0, 256, GEOMETRY.token_layer_bytes * 100 * 2, np.uint8)
    for pool in (device, host):
        pool.write(BLOCKS, tokens, layers, data)
        pool.copy_block(3, 1)
    everything = range(1024)
    assert np.array_equal(
        device.read([3, 0, 2, 1], everything, range(3)), host.read([3, 0, 2, 1], everything, range(3))
    )


def test_write_refuses_another_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="bytes for"):
        CudaKVPool(GEOMETRY, 4, torch.device("cuda")).write(BLOCKS, range(5), range(3), np.zeros(7, np.uint8))
