"""What a controller does next: a pure function of what should run and what is seen to run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count as count_up
from itertools import islice
from typing import TypeAlias

from pdserve.cluster.placement import Slot
from pdserve.core.events import Role


class Phase(Enum):
    """Where a worker is in its life, as far as its controller knows."""

    PLACING = auto()
    """Asked for; its ports are not bound yet, for want of a node with room, or because its process hangs."""
    STARTING = auto()
    READY = auto()
    DRAINING = auto()
    STUCK = auto()
    BROKEN = auto()
    STOPPING = auto()
    """Told to stop; it ends by itself."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is seen of one worker.

    Attributes:
        phase_s: for how long it has been in this phase.
        silent_s: since it last answered; 0 until it has been placed.
        held: attempts and transfers that it holds.
        leaving: it drains because there is one too many, not because an operator said so.
    """

    slot: Slot
    phase: Phase
    phase_s: float = 0.0
    silent_s: float = 0.0
    held: int = 0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """When patience ends.

    Attributes:
        start_s: for being placed, then for loading a model.
        silent_s: for an answer.
        drain_s: for a drain, before a worker that is leaving is stopped with what it still holds.
        stop_s: for stopping.
    """

    start_s: float
    silent_s: float
    drain_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Start:
    slot: Slot


@dataclass(frozen=True, slots=True)
class Kill:
    slot: Slot
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Begin to let go of a worker that is one too many."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Undrain:
    """Keep a worker that was leaving after all."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Stop:
    slot: Slot


Action: TypeAlias = Start | Kill | Drain | Undrain | Stop


def decide(
    desired: Mapping[Role, int], workers: Collection[WorkerView], limits: Limits, resting: Collection[Slot] = ()
) -> list[Action]:
    """The actions that bring what runs closer to what should.

    Args:
        desired: how many workers of each role.
        resting: slots that have failed lately and are left alone for now.
    """
    actions: list[Action] = []
    failed: set[Slot] = set()
    for worker in workers:
        reason = _failure(worker, limits)
        if reason:
            actions.append(Kill(worker.slot, reason))
            failed.add(worker.slot)
    for role in Role:
        of_role = [worker for worker in workers if worker.slot.role is role]
        kept = [worker for worker in of_role if worker.slot not in failed and worker.phase is not Phase.STOPPING]
        count = desired.get(role, 0)
        actions += _shrink(kept, len(kept) - count, limits)
        # What failed has its slot until it is gone; its replacement takes the same one.
        replaced = sum(1 for worker in of_role if worker.slot in failed)
        taken = {worker.slot for worker in of_role}
        fresh = islice(
            (slot for index in count_up() if (slot := Slot(role, index)) not in taken),
            max(0, count - len(kept) - replaced),
        )
        actions += [Start(slot) for slot in fresh if slot not in resting]
    return actions


def _failure(worker: WorkerView, limits: Limits) -> str:
    """Why a worker has to be killed; "" if it doesn't."""
    match worker.phase:
        # It ends by itself and says why. A kill would be the reason that is told, so it waits until that is overdue.
        case Phase.BROKEN if worker.phase_s > limits.silent_s:
            return "its engine broke"
        case Phase.STUCK:
            return "its engine is stuck"
        case Phase.PLACING if worker.phase_s > limits.start_s:
            return f"it had no ports after {limits.start_s:.0f} s: no node has room for its role, or its process hangs"
        case Phase.STARTING if worker.phase_s > limits.start_s:
            return f"it was not ready after {limits.start_s:.0f} s"
        case Phase.STOPPING if worker.phase_s > limits.stop_s:
            return f"it had not stopped after {limits.stop_s:.0f} s"
        case Phase.READY | Phase.DRAINING if worker.silent_s > limits.silent_s:
            return f"it has not answered for {worker.silent_s:.1f} s"
    return ""


def _shrink(workers: Collection[WorkerView], excess: int, limits: Limits) -> Iterator[Action]:
    """Let go of `excess` workers: those that are going already, then those that serve nobody yet, then the last ones."""
    going = sorted(workers, key=_worth)[: max(0, excess)]
    for worker in going:
        match worker.phase:
            case Phase.PLACING | Phase.STARTING:
                yield Kill(worker.slot, "it is no longer wanted")
            case Phase.DRAINING if worker.held == 0 or worker.phase_s > limits.drain_s:
                yield Stop(worker.slot)
            case Phase.READY:
                yield Drain(worker.slot)
    for worker in workers:
        if worker.leaving and worker.phase is Phase.DRAINING and worker not in going:
            yield Undrain(worker.slot)


def _worth(worker: WorkerView) -> tuple[bool, bool, bool, int]:
    serves = worker.phase is Phase.READY
    return (not worker.leaving, worker.phase is not Phase.DRAINING, serves, -worker.slot.index)
