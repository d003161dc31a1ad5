"""The log-probabilities of one prompt's tokens, as its prefill worker sends them."""

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import PromptLogprobs, TokenLogprobs


class PromptScores:
    """
    Args:
        num_tokens: of the prompt; 0 when nothing is wanted.
    Attributes:
        entries: of the tokens so far; None for the first, which follows nothing.
        complete: whether nothing is missing.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens
        self.entries: list[TokenLogprobs | None] = [None] if num_tokens else []
        self.complete = len(self.entries) == num_tokens

    def take(self, part: PromptLogprobs) -> None:
        """Add a stretch. A new attempt begins again, and what is known already changes nothing.

        Raises:
            PdserveError: protocol_violation; it leaves a gap, or ends beyond the prompt.
        """
        known = len(self.entries)
        if part.start > known or part.start + len(part.entries) > max(self._num_tokens, known):
            raise PdserveError(
                ErrorCode.protocol_violation,
                f"log-probabilities of {len(part.entries)} prompt tokens from {part.start} on, after {known} of "
                f"{self._num_tokens}",
            )
        self.entries += part.entries[known - part.start :]
        self.complete = len(self.entries) == self._num_tokens
