"""Who a worker is and where it is reached."""

from dataclasses import dataclass

from pdserve.core.events import Role


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One life of one worker.

    Attributes:
        epoch: random, new in each life.
        session_address, kv_address, admin_address: host:port as others reach them.
    """

    worker_id: str
    role: Role
    epoch: int
    session_address: str
    kv_address: str
    admin_address: str
    pid: int
