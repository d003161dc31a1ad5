"""Batches that grow, shrink and mix prompts with decode, run by an engine from its first step to its last."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.engine import Engine
from pdserve.engine.work import Group, Prefill, Release, Stop

_MAX_STEPS = 2000


@dataclass(frozen=True)
class Arrival:
    """A request: before which step it comes, and before which it is cancelled."""

    step: int
    prompt_tokens: int
    max_tokens: int
    siblings: int = 1
    cancel_step: int | None = None


# Prompts between decode steps, batches of 1 to 11 sequences, contexts over a page's edge, and some that do not finish.
MIXED_ARRIVALS = (
    Arrival(0, 5, 40),
    Arrival(3, 250, 30),
    Arrival(4, 257, 25, cancel_step=12),
    Arrival(6, 1, 12, siblings=3),
    Arrival(9, 300, 20),
    Arrival(10, 40, 1),
    Arrival(11, 17, 30, siblings=4, cancel_step=20),
    Arrival(14, 255, 9),
    Arrival(60, 12, 8),
)


@dataclass
class Served:
    """What came out.

    Attributes:
        tokens: (arrival, sibling) to its tokens in order.
    """

    tokens: dict[tuple[int, int], list[Token]] = field(default_factory=dict)

    @property
    def token_ids(self) -> dict[tuple[int, int], list[int]]:
        return {sequence: [token.token_id for token in tokens] for sequence, tokens in self.tokens.items()}


def serve(engine: Engine, arrivals: Sequence[Arrival] = MIXED_ARRIVALS, top_logprobs: int | None = None) -> Served:
    """Run all of them, greedily, until nothing is left; every block has been given back then."""
    served = Served()
    keys = [AttemptKey(GroupId(1, index), 1) for index in range(len(arrivals))]
    left = {key: arrival.siblings for key, arrival in zip(keys, arrivals, strict=True)}
    for step in range(_MAX_STEPS):
        for index, (key, arrival) in enumerate(zip(keys, arrivals, strict=True)):
            if arrival.step == step:
                engine.apply(Prefill(_group(key, index, arrival, top_logprobs), then_decode=True))
            if arrival.cancel_step == step and key in left:
                engine.apply(Stop(key))
                engine.apply(Release(key))
                del left[key]
        outcome = engine.step()
        assert not outcome.failed, outcome.failed
        for token in outcome.tokens:
            served.tokens.setdefault((keys.index(token.key), token.sibling), []).append(token)
            if token.finish is not None:
                left[token.key] -= 1
        for key in [key for key, siblings in left.items() if siblings == 0]:
            engine.apply(Release(key))
            del left[key]
        if not left:
            assert engine.scheduler.blocks.used_blocks == 0
            return served
    raise AssertionError(f"after {_MAX_STEPS} steps {len(left)} requests are not done")


def _group(key: AttemptKey, index: int, arrival: Arrival, top_logprobs: int | None) -> Group:
    return Group(
        key=key,
        siblings=tuple(range(arrival.siblings)),
        token_ids=np.random.default_rng(index).integers(2, 320, arrival.prompt_tokens, dtype=np.int32),
        prompt_tokens=arrival.prompt_tokens,
        params=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, top_logprobs=top_logprobs),
        seed=index,
        arrival_s=float(index),
    )
