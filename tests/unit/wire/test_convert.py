import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, Fault, InvalidRequest, PdserveError
from pdserve.core.events import EngineLoad, FinishReason, Role, Stage, StageReport
from pdserve.core.geometry import ITEMSIZE_BYTES, KVGeometry
from pdserve.core.ids import AttemptKey, GroupId, Ticket
from pdserve.core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from pdserve.rpc.v1 import common_pb2, session_pb2
from pdserve.wire.convert import (
    error_from_proto,
    error_to_proto,
    geometry_from_proto,
    geometry_to_proto,
    load_from_proto,
    pulse_to_proto,
    role_from_proto,
    role_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    stage_from_proto,
    stage_to_proto,
    ticket_from_proto,
    ticket_to_proto,
    to_milliseconds,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
counts = st.integers(1, 2**32 - 1)
groups = st.builds(GroupId, uint64, uint64)
keys = st.builds(AttemptKey, groups, counts)
geometries = st.builds(
    KVGeometry, st.text(), st.text(), st.sampled_from(sorted(ITEMSIZE_BYTES)), st.text(), counts, counts, counts, counts
)
seconds = st.floats(0, 1e9)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(counts)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.floats(0, 2)),
        top_k=draw(uint32),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(1e-3, 1e3)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(uint32, st.floats(-100, 100), max_size=5)),
        stop_ids=draw(st.frozensets(uint32, max_size=5)),
        top_logprobs=draw(st.none() | st.integers(0, MAX_TOP_LOGPROBS)),
        prompt_logprobs=draw(st.none() | st.integers(0, MAX_TOP_LOGPROBS)),
    )


@st.composite
def loads(draw: st.DrawFn) -> EngineLoad:
    free, cached, used = (draw(st.integers(0, 2**30)) for _ in range(3))
    return EngineLoad(
        step_age_s=draw(st.integers(0, 2**32 - 1)) / 1000,
        queued_tokens=draw(uint64),
        queued_sequences=draw(uint32),
        running_sequences=draw(uint32),
        free_blocks=free,
        cached_blocks=cached,
        total_blocks=free + cached + used,
        tokens_per_s=draw(seconds),
    )


def sent(message: Any) -> Any:
    """The message as it comes off the wire."""
    return type(message).FromString(message.SerializeToString())


def test_a_top_k_beyond_any_vocabulary_travels_as_the_largest_number() -> None:
    assert sampling_to_proto(SamplingParams(max_tokens=1, top_k=2**40)).top_k == 2**32 - 1


@given(geometry=geometries)
def test_a_geometry_comes_back(geometry: KVGeometry) -> None:
    assert geometry_from_proto(sent(geometry_to_proto(geometry))) == geometry


@given(ticket=st.builds(Ticket, uint64, uint64, keys, uint64))
def test_a_ticket_comes_back(ticket: Ticket) -> None:
    assert ticket_from_proto(sent(ticket_to_proto(ticket))) == ticket


@given(params=samplings())
def test_sampling_parameters_come_back(params: SamplingParams) -> None:
    assert sampling_from_proto(sent(sampling_to_proto(params))) == params


def test_default_sampling_parameters_come_back() -> None:
    params = SamplingParams(max_tokens=1)
    assert sampling_from_proto(sent(sampling_to_proto(params))) == params


@given(load=loads())
def test_a_load_comes_back(load: EngineLoad) -> None:
    pulse = sent(pulse_to_proto(load, session_pb2.WORKER_STATE_READY))
    assert pulse.state == session_pb2.WORKER_STATE_READY
    # Milliseconds round up.
    assert load_from_proto(pulse) == replace(load, step_age_s=pulse.step_age_ms / 1000)
    assert -1e-9 <= pulse.step_age_ms / 1000 - load.step_age_s <= 0.002


@given(key=keys, stage=st.sampled_from(Stage), took_s=seconds, cached=uint32)
def test_a_stage_report_comes_back(key: AttemptKey, stage: Stage, took_s: float, cached: int) -> None:
    report = StageReport(key, stage, took_s, cached)
    assert stage_from_proto(sent(stage_to_proto(report)), key.group.instance) == report


@pytest.mark.parametrize("role", Role)
def test_a_role_comes_back(role: Role) -> None:
    assert role_from_proto(role_to_proto(role)) is role


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("param", [None, "top_p"])
@pytest.mark.parametrize("retry_after_s", [None, 0.001, 2.5])
def test_an_error_comes_back(code: ErrorCode, param: str | None, retry_after_s: float | None) -> None:
    error = error_from_proto(
        sent(error_to_proto(PdserveError(code, "so it is", param=param, retry_after_s=retry_after_s)))
    )
    assert (error.code, error.message, error.param) == (code, "so it is", param)
    if isinstance(error, InvalidRequest):
        assert param
        assert code.spec.fault is Fault.CLIENT
    else:
        assert error.retry_after_s == retry_after_s


@pytest.mark.parametrize("code", ["", "from_the_future", "__class__", "Internal"])
def test_an_unknown_error_code_is_internal(code: str) -> None:
    error = error_from_proto(common_pb2.ErrorStatus(code=code, message="hm"))
    assert (error.code, error.message) == (ErrorCode.internal, "hm")


@pytest.mark.parametrize(
    ("core", "wire"),
    [(Role, common_pb2.Role), (FinishReason, common_pb2.FinishReason), (Stage, session_pb2.Stage)],
)
def test_numbers_and_names_of_core_enums_are_the_wires(core: Any, wire: Any) -> None:
    prefix = {"Role": "ROLE_", "FinishReason": "FINISH_REASON_", "Stage": "STAGE_"}[core.__name__]
    named = {name.removeprefix(prefix): number for name, number in wire.items() if number}
    assert named == {member.name: member.value for member in core}


@pytest.mark.parametrize(
    ("in_seconds", "milliseconds"),
    [(0.0, 0), (-1.0, 0), (0.0001, 1), (0.001, 1), (1.5, 1500), (1e12, 2**32 - 1), (math.inf, 2**32 - 1)],
)
def test_milliseconds_round_up_and_have_a_limit(in_seconds: float, milliseconds: int) -> None:
    assert to_milliseconds(in_seconds) == milliseconds


GEOMETRY = common_pb2.Geometry(dtype="float32", codec="raw", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
TICKET = common_pb2.Ticket(group=common_pb2.GroupId(instance=1, counter=1), attempt=1)
PULSE = session_pb2.WorkerPulse(free_blocks=1, cached_blocks=1, total_blocks=2)
STAGE = session_pb2.StageReport(group=1, attempt=1, stage=session_pb2.STAGE_QUEUE)
SAMPLING = sampling_to_proto(SamplingParams(max_tokens=5))


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(copy, name).extend(value)
        else:
            setattr(copy, name, value)
    return copy


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        *(
            (geometry_from_proto, changed(GEOMETRY, **{n: 0}))
            for n in ("num_layers", "num_kv_heads", "head_dim", "block_size")
        ),
        (ticket_from_proto, common_pb2.Ticket(attempt=1, nonce=3)),
        (ticket_from_proto, changed(TICKET, attempt=0)),
        (role_from_proto, 0),
        (role_from_proto, 7),
        (load_from_proto, changed(PULSE, total_blocks=1)),
        (load_from_proto, changed(PULSE, tokens_per_s=math.nan)),
        (load_from_proto, changed(PULSE, tokens_per_s=-1.0)),
        (load_from_proto, changed(PULSE, tokens_per_s=math.inf)),
        (lambda m: stage_from_proto(m, 1), changed(STAGE, stage=0)),
        (lambda m: stage_from_proto(m, 1), changed(STAGE, stage=99)),
        (lambda m: stage_from_proto(m, 1), changed(STAGE, attempt=0)),
        (lambda m: stage_from_proto(m, 1), changed(STAGE, seconds=math.nan)),
        (sampling_from_proto, changed(SAMPLING, bias=[1.0])),
        (sampling_from_proto, changed(SAMPLING, bias_token_id=[1, 2], bias=[1.0])),
    ],
)
def test_what_makes_no_sense_is_a_protocol_violation(decode: Any, message: Any) -> None:
    with pytest.raises(PdserveError) as refusal:
        decode(message)
    assert refusal.value.code is ErrorCode.protocol_violation


def test_a_dtype_of_another_build_is_a_geometry_mismatch_that_names_it() -> None:
    with pytest.raises(PdserveError, match="float8") as refusal:
        geometry_from_proto(changed(GEOMETRY, dtype="float8"))
    assert refusal.value.code is ErrorCode.geometry_mismatch


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("min_tokens", 6), ("temperature", math.nan), ("top_p", 0.0), ("top_logprobs", 21)],
)
def test_a_sampling_parameter_out_of_range_is_an_invalid_request(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        sampling_from_proto(changed(SAMPLING, **{field: value}))
    assert refusal.value.param == field
