"""Brings attempts to workers: at once where some take them, else through the waiting line."""

import random
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

from pdserve.core.events import Role
from services.frontend.router import Candidate, Pick, affinity_of, choose_decode, choose_prefill
from services.frontend.waiting import Place, WaitingLine
from services.frontend.workers import Worker


class Dispatchable(Protocol):
    """What wants workers.

    Attributes:
        priority, arrival_s: its place in the line.
        token_ids: what prefill has to compute.
        cache_scope: who may share the prefix cache.
        reserved_tokens: what decode reserves for all siblings together; None wants no decode worker.
        avoided: names of workers that have failed it; they are taken only if there are no others.
        is_admitted: its request has been let in, so a full line is no reason to refuse it.
    """

    priority: int
    arrival_s: float
    cache_scope: str
    is_admitted: bool

    @property
    def avoided(self) -> Set[str]: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def reserved_tokens(self) -> int | None: ...

    def send_to(self, prefill: Worker, decode: Worker | None) -> None:
        """Go: these take it. A colocated decode worker stands in prefill's place, and alone."""


class Dispatcher:
    """Chooses workers.

    Args:
        workers: all that are known, whatever their state.
        max_waiting: places in the line.
        clock: the loop's time, in seconds.
        pick: a random number below its argument.
    """

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        max_waiting: int,
        clock: Callable[[], float],
        pick: Pick = random.randrange,
    ) -> None:
        self.line: WaitingLine[Dispatchable] = WaitingLine(max_waiting, clock)
        self._workers = workers
        self._pick = pick

    def submit(self, request: Dispatchable) -> Place[Dispatchable] | None:
        """Send it now if nobody waits and workers take it, else wait in line.

        Returns: the place in the line; None when it has gone.
        Raises:
            PdserveError: queue_full.
        """
        if len(self.line) == 0 and self._send(request):
            return None
        return self.line.join(request, request.priority, request.arrival_s, beyond_limit=request.is_admitted)

    def on_workers_changed(self) -> None:
        """Workers came, went, or told their load: whoever can go now goes."""
        if len(self.line):
            self.line.serve(self._send)

    def _send(self, request: Dispatchable) -> bool:
        prefills = self._candidates(Role.PREFILL, request.avoided)
        decode: Worker | None = None
        reserved_tokens = request.reserved_tokens
        if reserved_tokens is not None or not prefills:
            decodes = self._candidates(Role.DECODE, request.avoided)
            if not prefills:
                decodes = {candidate: worker for candidate, worker in decodes.items() if worker.colocated}
            if not decodes:
                return False
            block_size = next(iter(decodes.values())).block_size
            blocks = -(-(reserved_tokens or len(request.token_ids) + 1) // block_size)
            decode = decodes[choose_decode(list(decodes), blocks, self._pick)]
            if decode.colocated:
                request.send_to(decode, None)
                return True
        request.send_to(self._prefill_for(request, prefills), decode)
        return True

    def _prefill_for(self, request: Dispatchable, prefills: dict[Candidate, Worker]) -> Worker:
        token_ids = request.token_ids
        block_size = next(iter(prefills.values())).block_size
        affinity = affinity_of(token_ids, block_size, request.cache_scope) if len(prefills) > 1 else b""
        return prefills[choose_prefill(list(prefills), len(token_ids), affinity, self._pick)]

    def _candidates(self, role: Role, avoided: Set[str]) -> dict[Candidate, Worker]:
        found = {
            candidate: worker
            for worker in self._workers()
            if worker.role is role and (candidate := worker.candidate()) is not None
        }
        preferred = {candidate: worker for candidate, worker in found.items() if candidate.name not in avoided}
        return preferred or found
