from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.events import EngineLoad, Role, Stage, StageReport
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.telemetry.metrics import FrontendMetrics, render

KEY = AttemptKey(GroupId(1, 1), 1)

FRONTEND_METRICS = {
    "pdserve_time_to_first_token_seconds",
    "pdserve_inter_token_latency_seconds",
    "pdserve_total_duration_seconds",
    "pdserve_tokens_in",
    "pdserve_tokens_out",
    "pdserve_tokens_overshoot",
    "pdserve_requests_started",
    "pdserve_requests",
    "pdserve_stream_interrupted",
    "pdserve_attempts",
    "pdserve_queue_depth",
    "pdserve_stage_seconds",
    "pdserve_worker_up",
    "pdserve_kv_blocks",
    "pdserve_sequences",
    "pdserve_queue_tokens",
    "pdserve_kv_handoff_bytes",
    "pdserve_event_loop_lag_seconds",
}


def families(registry: CollectorRegistry) -> set[str]:
    found = text_string_to_metric_families(render(registry).decode())
    return {family.name for family in found if not any(s.name.endswith("_created") for s in family.samples)}


def test_a_frontend_has_its_metrics() -> None:
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    assert families(registry) == FRONTEND_METRICS


def test_components_in_one_process_do_not_mix() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    FrontendMetrics(first).tokens_accepted(5)
    FrontendMetrics(second).tokens_accepted(1)
    assert first.get_sample_value("pdserve_tokens_out_total") == 5
    assert second.get_sample_value("pdserve_tokens_out_total") == 1


def test_a_model_that_is_not_known_becomes_other() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    metrics.know_model("real")
    for model in ("real", "made up", "'; DROP"):
        metrics.request_started(model)
        metrics.prompt_read(10)
        metrics.first_token(model, 0.3)
        metrics.next_token(model, 0.02)
        metrics.request_ended(model, "completed", 2.0)

    def value(name: str, model: str) -> float | None:
        labels = {"model": model, "outcome": "completed"} if name == "pdserve_requests_total" else {"model": model}
        return registry.get_sample_value(name, labels)

    for name in (
        "pdserve_requests_total",
        "pdserve_requests_started_total",
        "pdserve_time_to_first_token_seconds_count",
        "pdserve_inter_token_latency_seconds_count",
        "pdserve_total_duration_seconds_count",
    ):
        assert [value(name, model) for model in ("real", "other", "made up")] == [1, 2, None], name
    assert registry.get_sample_value("pdserve_tokens_in_total") == 30


def test_latencies_of_interest_fall_into_different_buckets() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    metrics.next_token("m", 0.035)
    metrics.first_token("m", 0.45)

    def count(name: str, bound: str) -> float | None:
        return registry.get_sample_value(f"{name}_bucket", {"model": "other", "le": bound})

    itl, ttft = "pdserve_inter_token_latency_seconds", "pdserve_time_to_first_token_seconds"
    assert [count(itl, bound) for bound in ("0.005", "0.03", "0.04", "2.0")] == [0, 0, 1, 1]
    assert [count(ttft, bound) for bound in ("0.01", "0.4", "0.5", "60.0")] == [0, 0, 1, 1]


def test_a_worker_that_is_no_member_any_more_leaves_no_label() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    labels = {"role": "decode", "worker": "decode-0"}
    metrics.worker_seen(Role.DECODE, "decode-0", up=True)
    assert registry.get_sample_value("pdserve_worker_up", labels) == 1
    metrics.worker_seen(Role.DECODE, "decode-0", up=False)
    assert registry.get_sample_value("pdserve_worker_up", labels) == 0
    metrics.worker_gone(Role.DECODE, "decode-0")
    metrics.worker_gone(Role.DECODE, "decode-0")
    assert registry.get_sample_value("pdserve_worker_up", labels) is None


def test_loads_of_all_workers_of_a_role_are_added_up() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    load = EngineLoad(
        queued_tokens=70,
        queued_sequences=2,
        running_sequences=3,
        free_blocks=5,
        cached_blocks=4,
        total_blocks=16,
    )
    metrics.set_loads([(Role.DECODE, load), (Role.DECODE, load), (Role.PREFILL, load)])

    def value(name: str, state: str) -> float | None:
        return registry.get_sample_value(name, {"role": "decode", "state": state})

    assert [value("pdserve_kv_blocks", state) for state in ("free", "cached", "used")] == [10, 8, 14]
    assert [value("pdserve_sequences", state) for state in ("queued", "running")] == [4, 6]
    assert registry.get_sample_value("pdserve_queue_tokens") == 210
    metrics.set_loads([])
    assert value("pdserve_kv_blocks", "used") == 0


def test_what_else_is_counted_shows() -> None:
    registry = CollectorRegistry()
    frontend = FrontendMetrics(registry)
    frontend.stage_took(StageReport(KEY, Stage.FIRST_STEP, 0.02))
    frontend.attempt_started("worker_lost")
    frontend.stream_interrupted("provider", "worker_lost")
    frontend.tokens_overshoot()
    frontend.set_queue_depth(4)
    frontend.loop_lagged(0.002)
    value = registry.get_sample_value
    assert value("pdserve_stage_seconds_sum", {"stage": "first_step"}) == 0.02
    assert value("pdserve_attempts_total", {"reason": "worker_lost"}) == 1
    assert value("pdserve_stream_interrupted_total", {"cause": "provider", "reason": "worker_lost"}) == 1
    assert value("pdserve_tokens_overshoot_total") == 1
    assert value("pdserve_queue_depth") == 4
    assert value("pdserve_event_loop_lag_seconds_count") == 1

    frontend.stage_took(StageReport(KEY, Stage.HANDOFF, 0.5, handoff_bytes=1 << 20))
    assert value("pdserve_kv_handoff_bytes_total") == 1 << 20
