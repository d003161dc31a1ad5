"""Groups of a scripted engine, and what they must be answered."""

import numpy as np

from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import scripted_answer
from pdserve.engine.work import Group


def make_group(
    counter: int, prompt_tokens: int, *, n: int = 1, max_tokens: int = 20, temperature: float = 0.0
) -> Group:
    rng = np.random.default_rng(counter)
    return Group(
        key=AttemptKey(GroupId(1, counter), 1),
        siblings=tuple(range(n)),
        token_ids=rng.integers(0, 49152, prompt_tokens, dtype=np.int32),
        prompt_tokens=prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        seed=counter,
        arrival_s=float(counter),
    )


def right_answer(group: Group, sibling: int) -> list[int]:
    prompt_ids = group.token_ids[: group.prompt_tokens]
    return scripted_answer(prompt_ids, group.params, seed=group.seed, sibling=sibling)
