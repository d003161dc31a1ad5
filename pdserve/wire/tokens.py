"""Tokens as packed columns: a step of any size is a handful of arrays, whatever it holds.

This is the hot path of the wire: it makes no message for each token, and loops in C.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from typing import cast

from pdserve.core.events import FinishReason, Token, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1.common_pb2 import FinishReason as WireFinish
from pdserve.rpc.v1.common_pb2 import TokenColumns
from pdserve.wire.convert import violation

# A named tuple's own constructor takes twice as long as what it calls.
_make_group = cast(Callable[[tuple[int, int]], GroupId], partial(tuple.__new__, GroupId))
_make_key = cast(Callable[[tuple[GroupId, int]], AttemptKey], partial(tuple.__new__, AttemptKey))
_make_token = cast(
    Callable[[tuple[AttemptKey, int, int, int, FinishReason | None, TokenLogprobs | None]], Token],
    partial(tuple.__new__, Token),
)

# Indexed by the wire's value.
_FINISH: tuple[FinishReason | None, ...] = (None, FinishReason.STOP, FinishReason.LENGTH)


def tokens_to_columns(tokens: Iterable[Token], columns: TokenColumns | None = None) -> TokenColumns:
    """The tokens of one frontend as columns, added below the rows of `columns` if it is given; returns the columns."""
    if columns is None:
        columns = TokenColumns()
    rows = list(tokens)
    if not rows:
        return columns
    above = len(columns.group)
    columns.group.extend([token.key.group.counter for token in rows])
    columns.attempt.extend([token.key.attempt for token in rows])
    columns.sibling.extend([token.sibling for token in rows])
    columns.position.extend([token.position for token in rows])
    columns.token_id.extend([token.token_id for token in rows])
    columns.finish.extend(cast("list[WireFinish.ValueType]", [token.finish or 0 for token in rows]))
    _append_logprobs(columns, [(row, t.logprobs) for row, t in enumerate(rows, above) if t.logprobs is not None])
    return columns


def _append_logprobs(columns: TokenColumns, found: list[tuple[int, TokenLogprobs]]) -> None:
    if not found:
        return
    columns.logprob_row.extend([row for row, _ in found])
    columns.logprob.extend([entry.logprob for _, entry in found])
    columns.top_count.extend([len(entry.top_ids) for _, entry in found])
    columns.top_id.extend(chain.from_iterable(entry.top_ids for _, entry in found))
    columns.top_logprob.extend(chain.from_iterable(entry.top_logprobs for _, entry in found))


def tokens_from_columns(columns: TokenColumns, instance: int) -> list[Token]:
    """The tokens of the frontend `instance`, in order.

    Raises:
        PdserveError: protocol_violation; columns don't fit each other, or a value makes no sense.
    """
    groups, attempts, finishes = list(columns.group), list(columns.attempt), list(columns.finish)
    siblings, positions, token_ids = list(columns.sibling), list(columns.position), list(columns.token_id)
    count = len(groups)
    if not count == len(attempts) == len(siblings) == len(positions) == len(token_ids) == len(finishes):
        raise violation("token columns of unequal length")
    if finishes and not 0 <= min(finishes) <= max(finishes) < len(_FINISH):
        raise violation("unknown finish reason")
    keys = map(_make_key, zip(map(_make_group, zip(repeat(instance), groups, strict=False)), attempts, strict=True))
    ends = map(_FINISH.__getitem__, finishes)
    logprobs = _logprobs_from(columns, count)
    return list(map(_make_token, zip(keys, siblings, positions, token_ids, ends, logprobs, strict=True)))


def _logprobs_from(columns: TokenColumns, count: int) -> list[TokenLogprobs | None]:
    entries: list[TokenLogprobs | None] = [None] * count
    rows, chosen, top_counts = list(columns.logprob_row), list(columns.logprob), list(columns.top_count)
    top_ids, top_logprobs = list(columns.top_id), list(columns.top_logprob)
    if not len(rows) == len(chosen) == len(top_counts):
        raise violation("logprob columns of unequal length")
    if not len(top_ids) == len(top_logprobs) == sum(top_counts):
        raise violation("logprobs of the best tokens don't fit their number")
    if not rows:
        return entries
    if rows[-1] >= count or any(later <= row for row, later in pairwise(rows)):
        raise violation("logprob rows that don't rise, or have no token")
    if any(value != value for value in chain(chosen, top_logprobs)):
        raise violation("a logprob that is not a number")
    for row, logprob, end, top_count in zip(rows, chosen, accumulate(top_counts), top_counts, strict=True):
        begin = end - top_count
        entries[row] = TokenLogprobs(logprob, tuple(top_ids[begin:end]), tuple(top_logprobs[begin:end]))
    return entries
