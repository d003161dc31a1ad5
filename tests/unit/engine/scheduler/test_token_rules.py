"""What ends a sequence, and which first tokens decode takes from prefill."""

from collections.abc import Callable

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.events import FinishReason, Token
from pdserve.engine.work import Commit, Prefill, Release
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group


@pytest.mark.parametrize(
    ("token_ids", "limits", "finish"),
    [
        ([50, 51, 9], {"max_tokens": 8}, FinishReason.STOP),
        ([9], {"max_tokens": 8}, FinishReason.STOP),
        ([50, 51, 52], {"max_tokens": 3}, FinishReason.LENGTH),
        ([50, 51, 9], {"max_tokens": 3}, FinishReason.STOP),
        ([50], {"max_tokens": 1}, FinishReason.LENGTH),
        # The first stop id that may be chosen is the one after min_tokens others.
        ([9, 9, 9], {"max_tokens": 8, "min_tokens": 2}, FinishReason.STOP),
        ([50, 50, 9], {"max_tokens": 8, "min_tokens": 2}, FinishReason.STOP),
        # The context ends at 10 tokens.
        ([50, 51, 52, 53], {"max_tokens": 8}, FinishReason.LENGTH),
        # Replayed output counts.
        ([50, 9], {"max_tokens": 8, "min_tokens": 2, "replayed_tokens": 1}, FinishReason.STOP),
        ([50, 51], {"max_tokens": 3, "replayed_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_a_token_rule(token_ids: list[int], limits: dict[str, int], finish: FinishReason) -> None:
    prompt = group(prompt_tokens=6, stop_ids=[9], **limits)
    start = len(prompt.token_ids)
    bench = Bench(max_context_tokens=10)
    bench.apply(Prefill(prompt, then_decode=True))
    tokens = [token for o in bench.run(lambda spec: token_ids[spec.position - start]) for token in o.tokens]
    assert [(token.position, token.token_id) for token in tokens] == list(enumerate(token_ids, start))
    assert [token.finish for token in tokens] == [None] * (len(tokens) - 1) + [finish]


def test_decode_repeats_the_first_tokens() -> None:
    bench = Bench()
    prompt = group(n=1)
    bench.granted(prompt)
    tokens = first_tokens(prompt)
    bench.apply(Commit(prompt.key, tokens))
    assert bench.scheduler.has_work
    outcome = bench.step()
    assert outcome.tokens[0] == tokens[0]
    assert [token.position for token in outcome.tokens] == [6, 7]


def test_a_first_token_that_ends_the_shorter_context_of_decode_ends_its_sequence() -> None:
    bench = Bench(max_context_tokens=7)
    prompt = group(prompt_tokens=6)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    assert [token.finish for token in bench.step().tokens] == [FinishReason.LENGTH]
    assert not bench.scheduler.attempts


@pytest.mark.parametrize("wrong", [lambda tokens: tokens[:1], lambda tokens: [t._replace(position=7) for t in tokens]])
def test_a_commit_with_wrong_first_tokens_fails_and_writes_nothing(wrong: Callable[[object], list[Token]]) -> None:
    bench = Bench()
    prompt = group(n=2)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, tuple(wrong(first_tokens(prompt)))))
    outcome = bench.step()
    assert [failed.error.code for failed in outcome.failed] == [ErrorCode.protocol_violation]
    assert outcome.tokens == []
    bench.apply(Release(prompt.key))
    assert (bench.used_blocks, bench.blocks.cached_blocks) == (0, 0)
