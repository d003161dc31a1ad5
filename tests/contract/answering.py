"""Workers that answer every attempt with the same tokens, and with log-probabilities where they are asked for."""

from collections.abc import Callable, Sequence

from pdserve.core.events import FinishReason, Token, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2
from tests.fake_worker import FakeWorker
from tests.frontend_stack import pair


def logprob_of(position: int) -> float:
    """Of the token at this index of the output."""
    return -0.25 * (position + 1)


def logprobs_of(token_id: int, index: int, count: int) -> TokenLogprobs:
    """The chosen token is the best one; those after it are ever less likely, and the last impossible."""
    best = [(token_id + rank, logprob_of(index) - rank) for rank in range(count)]
    if count > 1:
        best[-1] = (best[-1][0], float("-inf"))
    return TokenLogprobs(logprob_of(index), tuple(i for i, _ in best), tuple(logprob for _, logprob in best))


def answering(
    ids: Sequence[int],
    finish: FinishReason = FinishReason.LENGTH,
    *,
    one_by_one: bool = True,
    score: Callable[[FakeWorker, session_pb2.Attempt], None] | None = None,
) -> tuple[FakeWorker, FakeWorker]:
    """A prefill worker that says the first token, and a decode worker that says all of them.

    Args:
        one_by_one: each token in a message of its own.
        score: what prefill says of the prompt before its first token, when decode has said everything.
    """
    prefill, decode = pair()

    def answer(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
        key = AttemptKey(GroupId(worker.instance, attempt.group), attempt.attempt)
        asked = attempt.sampling.top_logprobs if attempt.sampling.HasField("top_logprobs") else None
        rest = ids[: attempt.sampling.max_tokens]
        for sibling in attempt.siblings:
            tokens = [
                Token(
                    key,
                    sibling,
                    attempt.total_tokens + index,
                    token_id,
                    finish if index == len(rest) - 1 else None,
                    None if asked is None else logprobs_of(token_id, index, asked),
                )
                for index, token_id in enumerate(rest)
            ]
            if score is None:
                worker.step(tokens[:1])
            if len(tokens) > 1:
                for part in [[token] for token in tokens] if one_by_one else [tokens]:
                    decode.step(part)
            if score is not None:
                score(worker, attempt)
                worker.step(tokens[:1])

    prefill.on_run(answer)
    return prefill, decode
