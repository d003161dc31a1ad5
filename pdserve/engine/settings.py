"""Limits of an engine's scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits of a step and of the queue.

    Attributes:
        step_tokens: tokens computed in a step at most; a longer prompt takes several.
        max_sequences: places in the batch; a reservation takes its places with its blocks.
        max_waiting: attempts in the queue; more are refused.
        max_context_tokens: of a sequence, prompt and output; None is as many as the model takes.
    """

    step_tokens: int = 512
    max_sequences: int = 256
    max_waiting: int = 10_000
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= self.step_tokens:
            # Otherwise decoding alone could take the whole budget, and no prompt would ever be read.
            raise ValueError(f"max_sequences must be from 1 to step_tokens ({self.step_tokens})")
        if self.max_waiting < 1:
            raise ValueError("max_waiting must be at least 1")
