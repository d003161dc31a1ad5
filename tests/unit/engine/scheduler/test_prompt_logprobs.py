"""Which tokens of a prompt are scored, and in which steps."""

import pytest

from pdserve.engine.work import Group, Prefill
from tests.unit.engine.scheduler.bench import Bench, group


def scored(bench: Bench, of: Group) -> list[float]:
    """The log-probabilities that came for a group, from its second token on, without a gap."""
    logprobs: list[float] = []
    for outcome in bench.run():
        for part in outcome.prompt_logprobs:
            assert part.key == of.key
            assert part.start == len(logprobs) + 1
            logprobs += [entry.logprob for entry in part.entries]
    return logprobs


@pytest.mark.parametrize("prompt_tokens", [1, 2, 15, 16, 17, 37])
def test_every_prompt_token_but_the_first_is_scored(prompt_tokens: int) -> None:
    bench = Bench(step_tokens=16)
    prompt = group(prompt_tokens=prompt_tokens, prompt_logprobs=2)
    bench.apply(Prefill(prompt))
    assert scored(bench, prompt) == [-float(token_id) for token_id in prompt.token_ids[1:]]


def test_replayed_output_is_not_scored() -> None:
    bench = Bench(step_tokens=16)
    prompt = group(prompt_tokens=10, replayed_tokens=20, max_tokens=30, prompt_logprobs=0)
    bench.apply(Prefill(prompt))
    assert scored(bench, prompt) == [-float(token_id) for token_id in prompt.token_ids[1:10]]


def test_what_the_cache_holds_is_computed_again_where_it_is_scored() -> None:
    bench = Bench()
    bench.prefilled(group(1, 12, first_id=5))
    again = group(2, 12, first_id=5, prompt_logprobs=1)
    bench.apply(Prefill(again))
    assert scored(bench, again) == [-float(token_id) for token_id in again.token_ids[1:]]
    plain = group(3, 12, first_id=5)
    bench.apply(Prefill(plain))
    (part,) = bench.scheduler.plan().slices
    assert (part.start, part.scores) == (8, None)


def test_a_step_scores_so_many_tokens_and_leaves_the_rest_to_others() -> None:
    bench = Bench(512, step_tokens=1000, max_context_tokens=2000)
    bench.apply(Prefill(group(1, 600, prompt_logprobs=0)), Prefill(group(2, 50)))
    sizes = []
    while bench.scheduler.has_work:
        bench.step()
        sizes.append([len(part.token_ids) for part in bench.plan.slices])
    assert sizes == [[256, 50], [256], [88]]
