"""Runs the steps of a transformers model over a paged cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry
from pdserve.core.sampling import SamplingParams
from pdserve.engine.attention.base import token_positions
from pdserve.engine.devices import default_block_size, find_device, finish_step, open_memory
from pdserve.engine.model_loading import compute_dtype, kv_geometry, load_config, load_model
from pdserve.engine.sampler import sample
from pdserve.engine.work import BlockCopy, Sampled, SampleSpec, SequenceSlice
from pdserve.model_folder import load_facts

_MIN_POOL_TOKENS = 256


class TorchModelRunner:
    """See `ModelRunner`. Sequences of one step are packed into one row and never influence each other.

    Args:
        folder: of the model; see `ensure_model`.
        dtype: of the KV cache: float32, bfloat16, or on a GPU float16. Weights and activations have it too, unless the
            CPU lacks arithmetic for it.
        device: cpu or cuda.
        num_blocks: size of the pool.
        block_size: tokens a block; None is the device's own.
    Raises:
        StartupError: the model is unusable or unsupported, or the device or the memory is not there.
    """

    def __init__(self, folder: Path, dtype: str, device: str, num_blocks: int, block_size: int | None = None) -> None:
        place = find_device(device)
        facts = load_facts(folder)
        config = load_config(folder)
        weights_dtype = compute_dtype(dtype, place)
        self.geometry: KVGeometry = kv_geometry(folder, config, dtype, block_size or default_block_size(place))
        if num_blocks * self.geometry.block_size < min(_MIN_POOL_TOKENS, facts.max_context_tokens):
            raise StartupError(
                f"a KV cache of {num_blocks} blocks of {self.geometry.block_bytes} bytes holds less than"
                f" {_MIN_POOL_TOKENS} tokens: configure more memory for it"
            )
        memory = open_memory(place, self.geometry, num_blocks, config.num_attention_heads)
        self.pool = memory.pool
        self.vocab_size = facts.vocab_size
        self.max_context_tokens = facts.max_context_tokens
        self._backend = memory.backend
        self._device = place
        self._model = load_model(folder, config, weights_dtype, place)
        self._dry_run()

    @classmethod
    def within_memory(
        cls, folder: Path, dtype: str, device: str, kv_cache_bytes: int, block_size: int | None = None
    ) -> Self:
        """A runner whose pool takes at most `kv_cache_bytes`. Raises StartupError as the constructor does."""
        size = block_size or default_block_size(find_device(device))
        geometry = kv_geometry(folder, load_config(folder), dtype, size)
        return cls(folder, dtype, device, kv_cache_bytes // geometry.block_bytes, block_size)

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice], copies: Sequence[BlockCopy]) -> list[list[Sampled]]:
        for copy in copies:
            self.pool.copy_block(copy.source, copy.target)
        if not slices:
            return []
        last_rows = np.cumsum([len(part.token_ids) for part in slices]) - 1
        sampled_slices = [index for index, part in enumerate(slices) if part.samples]
        token_ids = np.concatenate([part.token_ids for part in slices]).astype(np.int64)
        logits = self._model(
            input_ids=torch.from_numpy(token_ids).to(self._device)[None],
            position_ids=torch.from_numpy(token_positions(slices)).to(self._device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(last_rows[sampled_slices]).to(self._device),
            paged_step=self._backend.plan_step(slices),
        ).logits[0]
        wanted = [(row, spec) for row, index in enumerate(sampled_slices) for spec in slices[index].samples]
        tokens = iter(sample(logits, wanted))
        finish_step(self._device)
        return [[next(tokens) for _ in part.samples] for part in slices]

    def _dry_run(self) -> None:
        """Shows at start what the model asks of attention, and compiles what the steps will need."""
        prompt = np.zeros(2, np.int32)
        spec = SampleSpec(
            params=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
            sibling=0,
            position=1,
            token_ids=prompt[:1],
            prompt_tokens=1,
        )
        self.run([SequenceSlice(prompt, 0, (0,))], ())
        self.run([SequenceSlice(prompt[:1], 0, (0,), (spec,))], ())
        num_layers = self.geometry.num_layers
        written = self.pool.read((0,), range(2), range(num_layers)).reshape(num_layers, -1).any(axis=1)
        if not written.all():
            raise StartupError(f"layer {int(written.argmin())} of the model keeps no KV cache: choose another model")
