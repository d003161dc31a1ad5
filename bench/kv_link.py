"""What the real KV push carries between two processes: `python -m bench.kv_link BYTES` prints bytes a second.

This process is frontend and prefill worker in one: it reserves room in a decode worker, then pushes caches of the default
model's shape into it, two at a time. The decode worker is a process of its own with everything real but the model.
Frames, checksums, tickets, reservations and acknowledgements are those of served requests.
"""

import asyncio
import sys
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from bench.kv_receiver import GEOMETRY, MODEL, PUSH_TOKENS, receiver
from pdserve.config import SessionConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import PdserveError
from pdserve.core.events import EngineLoad, Role, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupIdMint, Ticket, random_id
from pdserve.core.sampling import SamplingParams
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.work import Progress
from pdserve.rpc.v1 import session_pb2
from pdserve.runtime.allocator import keep_freed_memory
from pdserve.wire.attempts import attempt_to_proto, prompt_parts
from pdserve.wire.convert import ticket_to_proto
from pdserve.wire.session_client import WorkerSession
from services.prefill.peers import Peers
from services.prefill.push import Push

PUSH_BYTES = PUSH_TOKENS * GEOMETRY.token_layer_bytes * GEOMETRY.num_layers
IN_FLIGHT = 2
WAIT_S = 30.0
STOP_S = 5.0


class _Frontend:
    """Hears the session with the decode worker."""

    def __init__(self) -> None:
        self.welcome: asyncio.Future[session_pb2.Welcome] = asyncio.get_running_loop().create_future()
        self.error: PdserveError | None = None

    def on_welcome(self, welcome: session_pb2.Welcome) -> None:
        if not self.welcome.done():
            self.welcome.set_result(welcome)

    def on_tokens(self, tokens: Sequence[Token]) -> None: ...

    def on_stages(self, stages: Sequence[StageReport]) -> None: ...

    def on_pulse(self, load: EngineLoad, state: "session_pb2.WorkerState.ValueType") -> None: ...

    def on_go_away(self, deadline_s: float) -> None: ...

    def on_failed(self, key: AttemptKey, error: PdserveError) -> None:
        self.error = error

    def on_lost(self, error: PdserveError) -> None:
        self.error = error


class _Acknowledgement:
    """Hears one push: ready when decode has room, done when it has all of it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()

    def on_ready(self, held_tokens: int) -> None:
        if held_tokens:
            self.on_failed(RuntimeError(f"{held_tokens} tokens were there already: prompts must be distinct"))
        else:
            self.ready.set_result(None)

    def on_acknowledged(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_stopped(self) -> None:
        self.on_failed(RuntimeError("the push was stopped"))


class Link:
    """A session with the decode worker, and everything that its pushes share."""

    def __init__(self, session: WorkerSession, welcome: session_pb2.Welcome, instance: int) -> None:
        self._session = session
        self._welcome = welcome
        self._mint = GroupIdMint(instance)
        self._epoch = random_id()
        self._random = np.random.default_rng(instance)
        self._blocks = tuple(range(GEOMETRY.blocks_for(PUSH_TOKENS)))
        self._pool = HostKVPool(GEOMETRY, len(self._blocks))
        self._pool.memory[...] = self._random.integers(0, 256, self._pool.memory.shape, np.uint8)
        self._config = SessionConfig()
        self._peers = Peers("bench", self._epoch, GEOMETRY, WAIT_S)

    async def push(self) -> None:
        """Reserve room for one prompt and push its cache.

        Raises:
            PdserveError: either was refused, or broke.
        """
        key = AttemptKey(self._mint.mint(), 1)
        ticket = Ticket(self._epoch, self._welcome.epoch, key, random_id())
        self._reserve(key, ticket)
        heard = _Acknowledgement()
        push = Push(self._peers, self._welcome.kv_address, ticket, self._pool, PUSH_TOKENS, heard, STOP_S)
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait({heard.ready, heard.done}, return_when=asyncio.FIRST_COMPLETED)
            if heard.ready.done():
                push.extend(Progress(key, PUSH_TOKENS, self._blocks))
                push.commit((Token(key, sibling=0, position=PUSH_TOKENS, token_id=0),))
            await heard.done

    async def close(self) -> None:
        await self._peers.close()

    def _reserve(self, key: AttemptKey, ticket: Ticket) -> None:
        token_ids = self._random.integers(0, 1 << 15, PUSH_TOKENS, np.int32)
        attempt = Attempt(
            key=key,
            siblings=(0,),
            prompt_tokens=PUSH_TOKENS,
            total_tokens=PUSH_TOKENS,
            params=SamplingParams(max_tokens=2, temperature=0.0),
            seed=0,
            model=MODEL,
        )
        parts = prompt_parts(key.group.counter, key.attempt, token_ids, self._config.message_bytes)
        reserve = session_pb2.Reserve(attempt=attempt_to_proto(attempt), ticket=ticket_to_proto(ticket))
        self._session.send(
            [*(session_pb2.Command(prompt_part=part) for part in parts), session_pb2.Command(reserve=reserve)]
        )


async def push_rate(address: str, bytes_total: int) -> float:
    """Push at least `bytes_total` bytes into the decode worker with sessions at `address`: bytes a second.

    The time is this process's alone, from the first push's opening to the last acknowledgement. One push before it
    makes connections, and touches the receiver's memory.
    """
    instance = random_id()
    frontend = _Frontend()
    session = WorkerSession(address, instance, Role.DECODE, SessionConfig(), frontend)
    session.start()
    try:
        async with asyncio.timeout(WAIT_S):
            welcome = await frontend.welcome
        link = Link(session, welcome, instance)
        await asyncio.gather(*(link.push() for _ in range(IN_FLIGHT)))
        left = -(-bytes_total // PUSH_BYTES)
        pushed_bytes = left * PUSH_BYTES

        async def pusher() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await link.push()

        start_s = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(pusher())
        seconds = perf_counter() - start_s
        await link.close()
    finally:
        await session.close()
    return pushed_bytes / seconds


def main(arguments: list[str]) -> int:
    """Start a receiver, push to it, and print the rate."""
    keep_freed_memory()  # as a prefill worker does
    with receiver() as address:
        print(asyncio.run(push_rate(address, int(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
