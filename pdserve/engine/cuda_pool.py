"""The KV pool in GPU memory."""

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.core.geometry import KVGeometry
from pdserve.engine.attention.base import PagedCache
from pdserve.engine.interfaces import Bytes
from pdserve.engine.model_loading import DTYPES

SCRATCH_BLOCKS = 1


class CudaKVPool:
    """Paged keys and values on a GPU, token by token within a block, as torch's varlen attention reads them.

    Transfers run on a stream of their own through pinned memory, so a running step waits for none of them. A step has
    ended on the device before its outcome is known, and a write before it returns: streams need no further order.

    Attributes:
        num_blocks: that requests are given.
        scratch_block: one more, beyond them: what no request is given, and padding may overwrite.
        cache: the memory as tensors, the scratch block included.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        self._memory = torch.zeros(
            (
                geometry.num_layers,
                2,
                num_blocks + SCRATCH_BLOCKS,
                geometry.block_size,
                geometry.num_kv_heads,
                geometry.head_dim,
            ),
            dtype=DTYPES[geometry.dtype],
            device=device,
        )
        self.cache = PagedCache(keys=self._memory[:, 0].transpose(2, 3), values=self._memory[:, 1].transpose(2, 3))
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The zeros above are written on another stream.
        torch.cuda.current_stream(device).synchronize()

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], tokens: range, layers: range) -> Bytes:
        """[bytes] of the tokens in order [layers, 2, kv_heads, tokens, head_dim]; `block_ids` start at position 0."""
        with torch.cuda.stream(self._transfers):
            blocks, offsets = self._slots(block_ids, tokens)
            chosen = self._memory[layers.start : layers.stop, :, blocks, offsets]
            canonical = chosen.transpose(2, 3).contiguous().view(torch.uint8).reshape(-1)
            pinned = torch.empty(canonical.shape, dtype=torch.uint8, pin_memory=True)
            pinned.copy_(canonical, non_blocking=True)
            self._transfers.record_event().synchronize()
        data: Bytes = pinned.numpy()
        return data

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
        """The reverse of `read`. Raises ValueError when `data` has not exactly the bytes of these tokens and layers."""
        wanted = self.geometry.token_layer_bytes * len(tokens) * len(layers)
        if data.size != wanted:
            raise ValueError(f"{data.size} bytes for {len(tokens)} tokens of {len(layers)} layers, not {wanted}")
        pinned = torch.empty(data.size, dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = data
        with torch.cuda.stream(self._transfers):
            blocks, offsets = self._slots(block_ids, tokens)
            arrived = pinned.to(self._memory.device, non_blocking=True).view(self._memory.dtype)
            canonical = arrived.view(len(layers), 2, self.geometry.num_kv_heads, len(tokens), self.geometry.head_dim)
            self._memory[layers.start : layers.stop, :, blocks, offsets] = canonical.transpose(2, 3)
            self._transfers.record_event().synchronize()

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block over all layers, on the step's stream."""
        self._memory[:, :, target] = self._memory[:, :, source]

    def _slots(self, block_ids: Sequence[int], tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] blocks and [tokens] offsets of a range of positions."""
        positions = np.arange(tokens.start, tokens.stop)
        size = self.geometry.block_size
        blocks = np.asarray(block_ids, np.int64)[positions // size]
        device = self._memory.device
        return torch.from_numpy(blocks).to(device), torch.from_numpy(positions % size).to(device)
