"""The engine's contract: what goes in (commands), what a step is (plan), what comes out (outcome).

Everything here is plain data, free of torch, shared by the scheduler, the model runners and the runtime that feeds them.
One thread owns an engine; commands reach it through its inbox, in order, before each step is planned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import PdserveError
from pdserve.core.events import EngineLoad, PromptLogprobs, StageReport, Token, TokenLogprobs
from pdserve.core.ids import AttemptKey
from pdserve.core.sampling import SamplingParams

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a worker knows of one attempt at a request.

    Attributes:
        siblings: indices of the sequences that share the prompt; [0 … n-1] at first, one of them in a replay.
        token_ids: [tokens] prompt and replayed output.
        prompt_tokens: where the prompt ends in `token_ids`; what follows counts as output.
        seed: of the request; each sibling's numbers are its own.
        cache_scope: who may share the prefix cache: a tenant or the request's cache salt.
        arrival_s: when the request reached its frontend, on this process's monotonic clock: smaller is older.
        priority: smaller goes first; age decides between equals.
    """

    key: AttemptKey
    siblings: tuple[int, ...]
    token_ids: TokenIds
    prompt_tokens: int
    params: SamplingParams
    seed: int
    cache_scope: str = ""
    arrival_s: float = 0.0
    priority: int = 0

    @property
    def max_total_tokens(self) -> int:
        """Tokens of one sibling when it has written all it may: what a reservation covers."""
        return self.prompt_tokens + self.params.max_tokens


# Commands. A command for a key that the engine no longer holds has no effect.


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt and sample each sibling's first token. Waits its turn for blocks, whole or not at all.

    Prompt blocks stay pinned after the first token until `Release`.
    With `then_decode` the sequences go on to decode here (`--colocated`, and tests).
    """

    group: Group
    then_decode: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take the blocks for prompt + max_tokens of every sibling. Waits its turn, whole or not at all; then `Granted`."""

    group: Group


@dataclass(frozen=True, slots=True)
class Commit:
    """The reservation's prompt cache is complete and verified: start decoding after these first tokens.

    There is one for every sibling that has not been stopped, and it did not end its sequence.
    """

    key: AttemptKey
    first_tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Out of the queue or the batch before the next step. Blocks stay pinned until `Release`.

    `siblings` None means all of them. A group whose last running sibling is stopped is stopped itself.
    """

    key: AttemptKey
    siblings: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody reads or writes the attempt's blocks any more: unpin them and forget the attempt. Implies `Stop`."""

    key: AttemptKey


Command = Prefill | Reserve | Commit | Stop | Release


# A step.


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One token to sample after a sequence's last computed position.

    Attributes:
        position: absolute position of the token that is sampled.
        token_ids: [position] everything before it.
        prompt_tokens: where output begins in `token_ids`.
    """

    params: SamplingParams
    seed: int
    sibling: int
    position: int
    token_ids: TokenIds
    prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.position - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Prompt tokens whose log-probabilities are wanted: those at positions start + 1 … of the slice that has this.

    Attributes:
        token_ids: [scored] the prompt's tokens there, at most as many as the slice computes.
        top_logprobs: how many of the best tokens to list for each.
    """

    token_ids: TokenIds
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: compute `token_ids` at positions start … start + len - 1.

    Attributes:
        block_ids: the sequence's blocks in order: those of positions 0 … end - 1 at least. What lies behind `end` is not
            written yet. Shared with the scheduler, not a copy: it stays as it is until the step has been learned.
        samples: what to sample after the last of them: nothing in the middle of a prompt, one in decode, n at the end
            of the prompt of n siblings.
        scores: what to score of the prompt, if anything.
    """

    token_ids: TokenIds
    start: int
    block_ids: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    scores: ScoreSpec | None = None

    @property
    def num_scored(self) -> int:
        return 0 if self.scores is None else len(self.scores.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Sampled(NamedTuple):
    """A sampled token, or a scored one; `logprobs` is set for a scored one, and when parameters ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


NO_TOKEN = Sampled(-1)
"""What is sampled from logits that are not numbers: the sequence cannot go on."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block over all layers before the step: a sibling's own copy of a partly filled block."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decided: slices to compute, after these copies. Empty means that there is nothing to do."""

    slices: tuple[SequenceSlice, ...]
    copies: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slices)


# What comes out.


@dataclass(frozen=True, slots=True)
class Granted:
    """A reservation has its blocks.

    Attributes:
        block_ids: the blocks of the prompt, in order; the transfer writes those from `held_tokens` on.
        held_tokens: leading tokens, whole blocks and at most prompt - 1, that are in the cache already.
    """

    key: AttemptKey
    block_ids: tuple[int, ...]
    held_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill has computed a prompt up to `computed_tokens`; those tokens' blocks may be read until `Release`.

    `block_ids` are the blocks of the whole prompt. The first Progress of a group also covers what the prefix cache held.

    Attributes:
        num_layers: how many layers of it, from the first. None is all of them; a number comes in the middle of a step,
            and the other layers with that step's outcome.
    """

    key: AttemptKey
    computed_tokens: int
    block_ids: tuple[int, ...]
    num_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine gave up on an attempt (its sequences are stopped; its blocks wait for `Release`)."""

    key: AttemptKey
    error: PdserveError


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that happened since the last one, in order within each list.

    A sequence whose Token carries `finish` is out of the batch. The engine keeps its group's blocks until `Release`
    in prefill; in decode it frees a sibling's own blocks at once and the group's when the last sibling ends.
    """

    tokens: list[Token] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    stages: list[StageReport] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)
