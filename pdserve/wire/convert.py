"""Core types to messages and back.

What comes off the wire is untrusted: a message that makes no sense raises PdserveError(protocol_violation), a sampling
parameter out of its range InvalidRequest.
"""

import math

from pdserve.core.errors import ErrorCode, Fault, InvalidRequest, PdserveError
from pdserve.core.events import EngineLoad, Role, Stage, StageReport
from pdserve.core.geometry import ITEMSIZE_BYTES, KVGeometry
from pdserve.core.ids import AttemptKey, GroupId, Ticket
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import common_pb2, session_pb2

MAX_UINT32 = 2**32 - 1


def violation(message: str) -> PdserveError:
    """The error of a peer that sent what it must not."""
    return PdserveError(ErrorCode.protocol_violation, message)


def to_milliseconds(seconds: float, limit: int = MAX_UINT32) -> int:
    """Whole milliseconds, at most `limit`; less than one that is not nothing counts as one."""
    return 0 if seconds <= 0 else math.ceil(min(limit, seconds * 1000))


def role_to_proto(role: Role) -> common_pb2.Role.ValueType:
    return common_pb2.Role.ValueType(role)


def role_from_proto(value: int) -> Role:
    try:
        return Role(value)
    except ValueError:
        raise violation(f"unknown role {value}") from None


def group_to_proto(group: GroupId) -> common_pb2.GroupId:
    return common_pb2.GroupId(instance=group.instance, counter=group.counter)


def key_from_proto(instance: int, counter: int, attempt: int) -> AttemptKey:
    """The key of an attempt on the session of the frontend `instance`."""
    if attempt == 0:
        raise violation("attempt 0: attempts count from 1")
    return AttemptKey(GroupId(instance, counter), attempt)


def geometry_to_proto(geometry: KVGeometry) -> common_pb2.Geometry:
    return common_pb2.Geometry(
        model_fingerprint=geometry.model_fingerprint,
        adapter=geometry.adapter,
        dtype=geometry.dtype,
        codec=geometry.codec,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
    )


def geometry_from_proto(geometry: common_pb2.Geometry) -> KVGeometry:
    """
    Raises:
        PdserveError: geometry_mismatch for an element type that this build doesn't know.
    """
    if geometry.dtype not in ITEMSIZE_BYTES:
        known = ", ".join(ITEMSIZE_BYTES)
        raise PdserveError(ErrorCode.geometry_mismatch, f"unknown dtype {geometry.dtype!r} of a KV cache, not {known}")
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        if getattr(geometry, name) == 0:
            raise violation(f"geometry with {name} 0")
    return KVGeometry(
        model_fingerprint=geometry.model_fingerprint,
        adapter=geometry.adapter,
        dtype=geometry.dtype,
        codec=geometry.codec,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
    )


def ticket_to_proto(ticket: Ticket) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        prefill_epoch=ticket.prefill_epoch,
        decode_epoch=ticket.decode_epoch,
        group=group_to_proto(ticket.key.group),
        attempt=ticket.key.attempt,
        nonce=ticket.nonce,
    )


def ticket_from_proto(ticket: common_pb2.Ticket) -> Ticket:
    if not ticket.HasField("group"):
        raise violation("a ticket without a group")
    return Ticket(
        prefill_epoch=ticket.prefill_epoch,
        decode_epoch=ticket.decode_epoch,
        key=key_from_proto(ticket.group.instance, ticket.group.counter, ticket.attempt),
        nonce=ticket.nonce,
    )


def sampling_to_proto(params: SamplingParams) -> session_pb2.Sampling:
    return session_pb2.Sampling(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        # No vocabulary has more: they are all of it.
        top_k=min(params.top_k, MAX_UINT32),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_token_id=list(params.logit_bias),
        bias=list(params.logit_bias.values()),
        stop_ids=sorted(params.stop_ids),
        top_logprobs=params.top_logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_proto(sampling: session_pb2.Sampling) -> SamplingParams:
    """
    Raises:
        InvalidRequest: a value is out of its range.
    """
    if len(sampling.bias_token_id) != len(sampling.bias):
        raise violation(f"{len(sampling.bias_token_id)} biased token ids with {len(sampling.bias)} biases")
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(zip(sampling.bias_token_id, sampling.bias, strict=True)),
        stop_ids=frozenset(sampling.stop_ids),
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def error_to_proto(error: PdserveError) -> common_pb2.ErrorStatus:
    return common_pb2.ErrorStatus(
        code=error.code.value,
        message=error.message,
        param=error.param or "",
        retry_after_ms=to_milliseconds(error.retry_after_s or 0.0),
    )


def error_from_proto(status: common_pb2.ErrorStatus) -> PdserveError:
    """A code that this build doesn't know counts as internal. Never raises."""
    code = ErrorCode(status.code) if status.code in ErrorCode.__members__ else ErrorCode.internal
    if status.param and code.spec.fault is Fault.CLIENT:
        return InvalidRequest(status.param, status.message, code)
    retry_after_s = status.retry_after_ms / 1000 if status.retry_after_ms else None
    return PdserveError(code, status.message, param=status.param or None, retry_after_s=retry_after_s)


def pulse_to_proto(load: EngineLoad, state: session_pb2.WorkerState.ValueType) -> session_pb2.WorkerPulse:
    return session_pb2.WorkerPulse(
        state=state,
        step_age_ms=to_milliseconds(load.step_age_s),
        queued_tokens=load.queued_tokens,
        queued_sequences=load.queued_sequences,
        running_sequences=load.running_sequences,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        total_blocks=load.total_blocks,
        tokens_per_s=load.tokens_per_s,
    )


def load_from_proto(pulse: session_pb2.WorkerPulse) -> EngineLoad:
    if pulse.free_blocks + pulse.cached_blocks > pulse.total_blocks:
        raise violation(
            f"{pulse.free_blocks} free and {pulse.cached_blocks} cached blocks of {pulse.total_blocks} in a pulse"
        )
    return EngineLoad(
        step_age_s=pulse.step_age_ms / 1000,
        queued_tokens=pulse.queued_tokens,
        queued_sequences=pulse.queued_sequences,
        running_sequences=pulse.running_sequences,
        free_blocks=pulse.free_blocks,
        cached_blocks=pulse.cached_blocks,
        total_blocks=pulse.total_blocks,
        tokens_per_s=_measured("tokens_per_s", pulse.tokens_per_s),
    )


def stage_to_proto(report: StageReport) -> session_pb2.StageReport:
    return session_pb2.StageReport(
        group=report.key.group.counter,
        attempt=report.key.attempt,
        stage=session_pb2.Stage.ValueType(report.stage),
        seconds=report.seconds,
        cached_tokens=report.cached_tokens,
        handoff_bytes=report.handoff_bytes,
    )


def stage_from_proto(report: session_pb2.StageReport, instance: int) -> StageReport:
    """`instance` is that of the session's frontend."""
    try:
        stage = Stage(report.stage)
    except ValueError:
        raise violation(f"unknown stage {report.stage}") from None
    return StageReport(
        key=key_from_proto(instance, report.group, report.attempt),
        stage=stage,
        seconds=_measured("seconds", report.seconds),
        cached_tokens=report.cached_tokens,
        handoff_bytes=report.handoff_bytes,
    )


def _measured(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise violation(f"{name} must be a finite number of at least 0, not {value}")
    return value
