"""Everything that can go wrong, once: one table maps each error to its HTTP status, OpenAI type, gRPC status and fault.

PdserveError
├── InvalidRequest        the client's input, names the field
└── everything else       raised as PdserveError(code, message)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto


class Fault(StrEnum):
    """Whose fault an error is. Only WORKER faults count against a worker; CLIENT faults are never retried."""

    CLIENT = "client"
    CAPACITY = "capacity"
    WORKER = "worker"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the table. `grpc_status` is the name of a grpc.StatusCode; `openai_type` the API's `error.type`."""

    http_status: int
    openai_type: str
    grpc_status: str
    fault: Fault
    retryable: bool


class ErrorCode(StrEnum):
    """What went wrong: the wire's and the API's `code`."""

    invalid_request = auto()
    context_length_exceeded = auto()
    unsupported = auto()
    unauthorized = auto()
    forbidden = auto()
    not_found = auto()
    model_not_found = auto()
    method_not_allowed = auto()
    body_timeout = auto()
    body_too_large = auto()
    unsupported_media_type = auto()
    client_gone = auto()
    cancelled = auto()
    queue_full = auto()
    no_capacity = auto()
    draining = auto()
    worker_lost = auto()
    transfer_failed = auto()
    bad_frame = auto()
    unknown_ticket = auto()
    stale_epoch = auto()
    geometry_mismatch = auto()
    protocol_violation = auto()
    engine_failed = auto()
    internal = auto()
    ttft_timeout = auto()
    idle_timeout = auto()
    total_timeout = auto()
    shutting_down = auto()

    @property
    def spec(self) -> ErrorSpec:
        return ERROR_TABLE[self]


ERROR_TABLE: Mapping[ErrorCode, ErrorSpec] = {
    ErrorCode.invalid_request: ErrorSpec(400, "invalid_request_error", "INVALID_ARGUMENT", Fault.CLIENT, False),
    ErrorCode.context_length_exceeded: ErrorSpec(400, "invalid_request_error", "INVALID_ARGUMENT", Fault.CLIENT, False),
    ErrorCode.unsupported: ErrorSpec(400, "invalid_request_error", "UNIMPLEMENTED", Fault.CLIENT, False),
    ErrorCode.unauthorized: ErrorSpec(401, "authentication_error", "UNAUTHENTICATED", Fault.CLIENT, False),
    ErrorCode.forbidden: ErrorSpec(403, "permission_error", "PERMISSION_DENIED", Fault.CLIENT, False),
    ErrorCode.not_found: ErrorSpec(404, "invalid_request_error", "NOT_FOUND", Fault.CLIENT, False),
    ErrorCode.model_not_found: ErrorSpec(404, "invalid_request_error", "NOT_FOUND", Fault.CLIENT, False),
    ErrorCode.method_not_allowed: ErrorSpec(405, "invalid_request_error", "UNIMPLEMENTED", Fault.CLIENT, False),
    ErrorCode.body_timeout: ErrorSpec(408, "invalid_request_error", "DEADLINE_EXCEEDED", Fault.CLIENT, False),
    ErrorCode.body_too_large: ErrorSpec(413, "invalid_request_error", "INVALID_ARGUMENT", Fault.CLIENT, False),
    ErrorCode.unsupported_media_type: ErrorSpec(415, "invalid_request_error", "INVALID_ARGUMENT", Fault.CLIENT, False),
    ErrorCode.client_gone: ErrorSpec(499, "client_closed_request", "CANCELLED", Fault.CLIENT, False),
    ErrorCode.cancelled: ErrorSpec(499, "client_closed_request", "CANCELLED", Fault.CLIENT, False),
    # Capacity: the request is fine, and comes back later or elsewhere.
    ErrorCode.queue_full: ErrorSpec(503, "service_unavailable", "RESOURCE_EXHAUSTED", Fault.CAPACITY, True),
    ErrorCode.no_capacity: ErrorSpec(503, "service_unavailable", "UNAVAILABLE", Fault.CAPACITY, True),
    ErrorCode.draining: ErrorSpec(503, "service_unavailable", "UNAVAILABLE", Fault.CAPACITY, True),
    # The cluster's own failures: a new attempt may succeed.
    ErrorCode.worker_lost: ErrorSpec(503, "service_unavailable", "UNAVAILABLE", Fault.WORKER, True),
    ErrorCode.transfer_failed: ErrorSpec(503, "service_unavailable", "ABORTED", Fault.WORKER, True),
    ErrorCode.bad_frame: ErrorSpec(503, "service_unavailable", "DATA_LOSS", Fault.WORKER, True),
    ErrorCode.unknown_ticket: ErrorSpec(503, "service_unavailable", "FAILED_PRECONDITION", Fault.WORKER, True),
    ErrorCode.stale_epoch: ErrorSpec(503, "service_unavailable", "FAILED_PRECONDITION", Fault.WORKER, True),
    ErrorCode.geometry_mismatch: ErrorSpec(503, "service_unavailable", "FAILED_PRECONDITION", Fault.WORKER, True),
    ErrorCode.protocol_violation: ErrorSpec(500, "server_error", "FAILED_PRECONDITION", Fault.WORKER, True),
    ErrorCode.engine_failed: ErrorSpec(500, "server_error", "INTERNAL", Fault.WORKER, True),
    ErrorCode.internal: ErrorSpec(500, "server_error", "INTERNAL", Fault.WORKER, False),
    # Time ran out.
    ErrorCode.ttft_timeout: ErrorSpec(504, "timeout_error", "DEADLINE_EXCEEDED", Fault.TIMEOUT, False),
    ErrorCode.idle_timeout: ErrorSpec(504, "timeout_error", "DEADLINE_EXCEEDED", Fault.TIMEOUT, False),
    ErrorCode.total_timeout: ErrorSpec(504, "timeout_error", "DEADLINE_EXCEEDED", Fault.TIMEOUT, False),
    ErrorCode.shutting_down: ErrorSpec(503, "service_unavailable", "UNAVAILABLE", Fault.SHUTDOWN, False),
}


class PdserveError(Exception):
    """An error with a code of the table.

    Args:
        code: the row of the table.
        message: one sentence for a person; it names the field and the limit, or what to do.
        param: the request field at fault, if it was one.
        retry_after_s: when to come back, for capacity errors.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        # A pickled copy is made from these, then given the attributes: Ray carries errors between processes.
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def spec(self) -> ErrorSpec:
        return self.code.spec

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class InvalidRequest(PdserveError):
    """A request field holds something that is not allowed."""

    def __init__(self, param: str, message: str, code: ErrorCode = ErrorCode.invalid_request) -> None:
        super().__init__(code, message, param=param)


def internal_error() -> PdserveError:
    """A defect, as those outside hear of it: what happened is for the log of whoever caught it."""
    return PdserveError(ErrorCode.internal, "the server failed; the error is in its log")


class StartupError(Exception):
    """A process cannot start. The message is one line that says what to do; the process exits with status 1."""


class IllegalTransition(Exception):
    """A state machine was given an event that its state has no handler for: a defect, never a client's fault."""

    def __init__(self, state: object, event: object) -> None:
        super().__init__(state, event)
        self.state = state
        self.event = event

    def __str__(self) -> str:
        return f"{type(self.event).__name__} in state {type(self.state).__name__}"
