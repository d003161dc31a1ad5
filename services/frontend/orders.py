"""What the workers of one attempt are told, all of it at the same moment."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.ids import AttemptKey, Ticket, random_id
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.wire.attempts import prompt_parts
from pdserve.wire.convert import ticket_to_proto
from services.frontend.workers import Worker


@dataclass(frozen=True, slots=True)
class Orders:
    """The commands for each worker, in order; none for a decode worker that isn't wanted."""

    prefill: Sequence[pb.Command]
    decode: Sequence[pb.Command]


def write_orders(
    key: AttemptKey,
    attempt: pb.Attempt,
    token_ids: Sequence[int],
    prefill: Worker,
    decode: Worker | None,
    message_bytes: int,
) -> Orders:
    """
    Args:
        token_ids: prompt and replayed output.
        prefill: a colocated decode worker reserves, and reads the prompt itself.
        message_bytes: no command is larger.
    """
    parts = [
        pb.Command(prompt_part=part) for part in prompt_parts(key.group.counter, key.attempt, token_ids, message_bytes)
    ]
    if prefill.colocated:
        return Orders([*parts, pb.Command(reserve=pb.Reserve(attempt=attempt))], [])
    if decode is None:
        return Orders([*parts, pb.Command(run=pb.Run(attempt=attempt))], [])
    ticket = ticket_to_proto(Ticket(prefill.epoch, decode.epoch, key, random_id()))
    run = pb.Run(attempt=attempt, ticket=ticket, decode_address=decode.kv_address)
    return Orders(
        [*parts, pb.Command(run=run)], [*parts, pb.Command(reserve=pb.Reserve(attempt=attempt, ticket=ticket))]
    )
