"""One attempt at a request, as its frontend describes it to a worker."""

from dataclasses import dataclass

from pdserve.core.ids import AttemptKey
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a worker is told of an attempt, apart from its token ids.

    Attributes:
        siblings: indices of the sequences that share the prompt; [0 … n-1] at first, one of them in a replay.
        prompt_tokens: where the prompt ends in the token ids; what follows is replayed output.
        total_tokens: token ids that travel, prompt and replayed output.
        seed: of the request, in [0, 2**64); each sibling's numbers are its own.
        model, adapter: what is to be run; adapter "" is none.
        cache_scope: who may share the prefix cache: a tenant or the request's cache salt.
        age_s: since the request reached its frontend.
        remaining_s: until its deadline; None is no deadline.
        priority: smaller goes first; age decides between equals.
    """

    key: AttemptKey
    siblings: tuple[int, ...]
    prompt_tokens: int
    total_tokens: int
    params: SamplingParams
    seed: int
    model: str
    adapter: str = ""
    cache_scope: str = ""
    age_s: float = 0.0
    remaining_s: float | None = None
    priority: int = 0
