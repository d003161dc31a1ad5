"""One prompt and how it is to be answered: what stays the same over all attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from pdserve.core.attempt import Attempt
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.wire.attempts import attempt_to_proto
from services.frontend.prompt_scores import PromptScores

# A deadline that has just passed is still one.
_LEAST_REMAINING_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What was fixed when a request was admitted.

    Attributes:
        attempt_numbers: numbers of attempts, each used once in the group.
        scores: the prompt's log-probabilities, whichever attempt brings them.
        arrival_s, deadline_s: on the loop's clock.
    """

    group: GroupId
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    model: str
    cache_scope: str
    priority: int
    arrival_s: float
    deadline_s: float
    attempt_numbers: "count[int]"
    scores: PromptScores = field(default_factory=PromptScores)

    def describe(self, key: AttemptKey, siblings: Sequence[int], total_tokens: int, now_s: float) -> pb.Attempt:
        """One attempt, as workers are told of it.

        Args:
            total_tokens: token ids that travel, prompt and replayed output.
        """
        return attempt_to_proto(
            Attempt(
                key=key,
                siblings=tuple(siblings),
                prompt_tokens=len(self.prompt_ids),
                total_tokens=total_tokens,
                params=replace(self.params, prompt_logprobs=None) if self.scores.complete else self.params,
                seed=self.seed,
                model=self.model,
                cache_scope=self.cache_scope,
                age_s=now_s - self.arrival_s,
                remaining_s=max(self.deadline_s - now_s, _LEAST_REMAINING_S),
                priority=self.priority,
            )
        )
