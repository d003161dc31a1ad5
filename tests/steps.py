"""Driving a model runner by hand, and the reference it is held to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdserve.core.sampling import SamplingParams
from pdserve.engine.interfaces import ModelRunner
from pdserve.engine.work import SampleSpec, SequenceSlice

# Two logits closer than this may change places by rounding.
TIE = 1e-4
GREEDY = SamplingParams(max_tokens=4096, temperature=0.0)


@dataclass
class _Running:
    """A prompt on its way."""

    token_ids: list[int]
    prompt_tokens: int
    block_ids: tuple[int, ...]
    computed: int = 0
    output: list[int] = field(default_factory=list)


def sample_spec(token_ids: Sequence[int], prompt_tokens: int, params: SamplingParams = GREEDY) -> SampleSpec:
    """What samples the token after `token_ids`."""
    return SampleSpec(
        params=params,
        seed=1,
        sibling=0,
        position=len(token_ids),
        token_ids=np.array(token_ids, np.int32),
        prompt_tokens=prompt_tokens,
    )


def generate(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, chunk_tokens: int = 32
) -> list[list[int]]:
    """Each prompt's greedy continuation, all in one batch, over blocks in random order."""
    blocks = np.random.default_rng(0).permutation(runner.pool.num_blocks).tolist()
    sequences = []
    for prompt in prompts:
        count = runner.geometry.blocks_for(len(prompt) + num_tokens)
        sequences.append(_Running(list(prompt), len(prompt), tuple(blocks[:count])))
        del blocks[:count]
    while running := [s for s in sequences if len(s.output) < num_tokens]:
        slices = [_next_slice(sequence, chunk_tokens) for sequence in running]
        for sequence, part, sampled in zip(running, slices, runner.run(slices, ()), strict=True):
            sequence.computed = part.end
            for token in sampled:
                sequence.token_ids.append(token.token_id)
                sequence.output.append(token.token_id)
    return [sequence.output for sequence in sequences]


def _next_slice(sequence: _Running, chunk_tokens: int) -> SequenceSlice:
    end = min(len(sequence.token_ids), sequence.computed + chunk_tokens)
    return SequenceSlice(
        token_ids=np.array(sequence.token_ids[sequence.computed : end], np.int32),
        start=sequence.computed,
        block_ids=sequence.block_ids,
        samples=(sample_spec(sequence.token_ids, sequence.prompt_tokens),) if end == len(sequence.token_ids) else (),
    )


@dataclass(frozen=True)
class Expected:
    """The reference's continuation, and how far apart its two best logits were at each token."""

    token_ids: list[int]
    margins: list[float]

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Equal, or first different where the reference itself was at a tie."""
        for got, wanted, margin in zip(token_ids, self.token_ids, self.margins, strict=True):
            if got != wanted:
                return margin < TIE
        return True


class Oracle:
    """transformers' own `generate`, in float32, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()

    def prompt_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """[prompt - 1, vocab] log-probabilities of what follows each token but the last."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(prompt)])).logits[0, :-1]
        return torch.log_softmax(logits, dim=-1)

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        """Greedy, past every end token."""
        ids = torch.tensor([list(prompt)])
        result = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([logits[0] for logits in result.logits]).topk(2).values
        return Expected(result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
