"""A prompt's log-probabilities on the wire: packed columns, as tokens are."""

from itertools import chain

from pdserve.core.events import PromptLogprobs, TokenLogprobs
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.convert import key_from_proto, violation


def prompt_logprobs_to_proto(part: PromptLogprobs) -> session_pb2.PromptLogprobs:
    """A stretch whose entries all list equally many of the best tokens."""
    return session_pb2.PromptLogprobs(
        group=part.key.group.counter,
        attempt=part.key.attempt,
        start=part.start,
        logprob=[entry.logprob for entry in part.entries],
        top_count=len(part.entries[0].top_ids) if part.entries else 0,
        top_id=chain.from_iterable(entry.top_ids for entry in part.entries),
        top_logprob=chain.from_iterable(entry.top_logprobs for entry in part.entries),
    )


def prompt_logprobs_from_proto(part: session_pb2.PromptLogprobs, instance: int) -> PromptLogprobs:
    """The stretch of the frontend `instance`.

    Raises:
        PdserveError: protocol_violation; the columns do not fit each other, or hold what is no number.
    """
    logprobs, top_ids, top_logprobs = list(part.logprob), list(part.top_id), list(part.top_logprob)
    count = part.top_count
    if not len(top_ids) == len(top_logprobs) == count * len(logprobs):
        raise violation("prompt logprobs of the best tokens don't fit their number")
    if part.start == 0:
        raise violation("nothing comes before a prompt's first token")
    if any(value != value for value in chain(logprobs, top_logprobs)):
        raise violation("a logprob that is not a number")
    entries = tuple(
        TokenLogprobs(logprob, tuple(top_ids[begin : begin + count]), tuple(top_logprobs[begin : begin + count]))
        for logprob, begin in zip(logprobs, range(0, max(count, 1) * len(logprobs), max(count, 1)), strict=True)
    )
    return PromptLogprobs(key_from_proto(instance, part.group, part.attempt), part.start, entries)
