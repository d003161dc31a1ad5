"""What happens to sequences, as facts that travel from engines to frontends."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pdserve.core.ids import AttemptKey


class Role(IntEnum):
    """What a worker does. Values are the wire's."""

    PREFILL = 1
    DECODE = 2

    def __str__(self) -> str:
        return self.name.lower()


class FinishReason(IntEnum):
    """Why a sequence ended by a token rule. Values are the wire's; 0 there means it goes on."""

    STOP = 1
    LENGTH = 2

    def __str__(self) -> str:
        return self.name.lower()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, from the model's unmodified logits.

    `top_ids` and `top_logprobs` list the best tokens in falling order, as many as were asked for.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Token(NamedTuple):
    """One token that an engine produced.

    Attributes:
        position: its index in prompt + output; the first output token's is the prompt's length.
        finish: set on a sequence's last token.
    """

    key: AttemptKey
    sibling: int
    position: int
    token_id: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A stretch of a prompt's log-probabilities: of its tokens from position `start` (at least 1) on, in order.

    Stretches of one attempt come in order and without gaps, all of them before its first token.
    """

    key: AttemptKey
    start: int
    entries: tuple[TokenLogprobs, ...]


class Stage(IntEnum):
    """A stretch of a request that is measured inside one process. Values are the wire's."""

    QUEUE = 1
    PREFILL = 2
    HANDOFF = 3
    FIRST_STEP = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class StageReport:
    """How long a stage took.

    Attributes:
        cached_tokens: with PREFILL, how much of the prompt came from the prefix cache.
        handoff_bytes: with HANDOFF, how much of the cache was pushed.
    """

    key: AttemptKey
    stage: Stage
    seconds: float
    cached_tokens: int = 0
    handoff_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a worker's pulse says of its engine; routing reads it.

    Attributes:
        step_age_s: seconds since the last step ended; an idle engine ticks once a second.
        queued_tokens: prompt tokens that wait or are being computed.
        queued_sequences: groups that wait for blocks or for their turn.
        running_sequences: sequences in the batch.
        free_blocks, cached_blocks, total_blocks: cached ones can be taken when free ones run out.
        tokens_per_s: prompt tokens computed a second, smoothed (prefill); 0 when not yet known.
    """

    step_age_s: float = 0.0
    queued_tokens: int = 0
    queued_sequences: int = 0
    running_sequences: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    tokens_per_s: float = 0.0
