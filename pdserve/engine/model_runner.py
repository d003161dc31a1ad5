"""Runs the steps of a transformers model over a paged cache."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry
from pdserve.core.sampling import SamplingParams
from pdserve.engine.attention.base import LayerTeller, StepAttention, token_positions
from pdserve.engine.decode_graphs import DecodeGraphs, capture_decode_steps
from pdserve.engine.devices import blocks_within, default_block_size, find_device, finish_step, open_memory
from pdserve.engine.model_loading import compute_dtype, kv_geometry, load_config, load_model
from pdserve.engine.sampler import sample, score
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
        max_graph_rows: decode steps of up to so many sequences run as CUDA graphs where they can; 0 makes none.
    Raises:
        StartupError: the model is unusable or unsupported, or the device or the memory is not there.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        num_blocks: int,
        block_size: int | None = None,
        max_graph_rows: int = 0,
    ) -> None:
        place = find_device(device)
        facts = load_facts(folder)
        config = load_config(folder)
        weights_dtype = compute_dtype(dtype, place)
        self.geometry: KVGeometry = kv_geometry(folder, config, dtype, block_size or default_block_size(place))
        if num_blocks * self.geometry.block_size < min(_MIN_POOL_TOKENS, facts.max_context_tokens):
            raise StartupError(
                f"a KV cache of {num_blocks} blocks of {self.geometry.block_bytes} bytes holds less than"
                f" {_MIN_POOL_TOKENS} tokens: raise engine.kv_memory_bytes or engine.num_blocks"
            )
        memory = open_memory(place, self.geometry, num_blocks, config.num_attention_heads)
        self.pool = memory.pool
        self.vocab_size = facts.vocab_size
        self.max_context_tokens = facts.max_context_tokens
        self._backend = memory.backend
        self._device = place
        self._model = load_model(folder, config, weights_dtype, place)
        self._graphs: DecodeGraphs | None = None
        self._dry_run()
        max_blocks = min(num_blocks, self.geometry.blocks_for(self.max_context_tokens))
        self._graphs = capture_decode_steps(
            self._forward, memory.backend, max_graph_rows, max_blocks, memory.scratch_block, place
        )

    @classmethod
    def within_memory(
        cls,
        folder: Path,
        dtype: str,
        device: str,
        kv_cache_bytes: int,
        block_size: int | None = None,
        max_graph_rows: int = 0,
    ) -> Self:
        """A runner whose pool takes at most `kv_cache_bytes`. Raises StartupError as the constructor does."""
        place = find_device(device)
        geometry = kv_geometry(folder, load_config(folder), dtype, block_size or default_block_size(place))
        num_blocks = blocks_within(place, geometry, kv_cache_bytes)
        return cls(folder, dtype, device, num_blocks, block_size, max_graph_rows)

    @torch.inference_mode()
    def run(
        self,
        slices: Sequence[SequenceSlice],
        copies: Sequence[BlockCopy],
        on_layers: Callable[[int], None] | None = None,
    ) -> list[list[Sampled]]:
        """See `ModelRunner.run`. Only a CPU tells of layers: a GPU has not computed what has been launched."""
        for copy in copies:
            self.pool.copy_block(copy.source, copy.target)
        if not slices:
            return []
        sampled_slices = [index for index, part in enumerate(slices) if part.samples]
        scored_rows = _scored_rows(slices)
        if self._graphs is not None and not scored_rows and self._graphs.covers(slices):
            logits = self._graphs.run(slices)[sampled_slices]
        else:
            step = self._backend.plan_step(slices)
            if on_layers is not None and self._device.type == "cpu":
                step = LayerTeller(step, on_layers)
            logits = self._run_eagerly(slices, step, scored_rows, sampled_slices)
        wanted = [(row, spec) for row, index in enumerate(sampled_slices) for spec in slices[index].samples]
        tokens = iter(sample(logits[len(scored_rows) :], wanted))
        scored = iter(score(logits[: len(scored_rows)], [part.scores for part in slices if part.scores is not None]))
        finish_step(self._device)
        return [[*islice(scored, part.num_scored), *islice(tokens, len(part.samples))] for part in slices]

    def _run_eagerly(
        self, slices: Sequence[SequenceSlice], step: StepAttention, scored_rows: list[int], sampled_slices: list[int]
    ) -> Tensor:
        """[scored rows + sampled slices, vocab] logits of these rows, then after the last token of each of these slices."""
        last_rows = np.cumsum([len(part.token_ids) for part in slices]) - 1
        logit_rows = np.concatenate([scored_rows, last_rows[sampled_slices]])
        token_ids = np.concatenate([part.token_ids for part in slices]).astype(np.int64)
        return self._forward(
            torch.from_numpy(token_ids).to(self._device),
            torch.from_numpy(token_positions(slices)).to(self._device),
            step,
            torch.from_numpy(logit_rows.astype(np.int64)).to(self._device),
        )

    def _forward(
        self, token_ids: Tensor, positions: Tensor, step: StepAttention, logit_rows: Tensor | int = 0
    ) -> Tensor:
        """[rows, vocab] logits of these rows of [tokens] token ids and positions; 0 stands for all of them."""
        logits: Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            paged_step=step,
        ).logits[0]
        return logits

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


def _scored_rows(slices: Sequence[SequenceSlice]) -> list[int]:
    """Rows of the packed step whose logits say how likely the prompt's next token was."""
    rows: list[int] = []
    if all(part.scores is None for part in slices):
        return rows
    begin = 0
    for part in slices:
        rows += range(begin, begin + part.num_scored)
        begin += len(part.token_ids)
    return rows
