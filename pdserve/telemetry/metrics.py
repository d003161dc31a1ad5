"""The metrics of a frontend, in a registry that it is given, so that several fit into one process.

Workers have none of their own: their pulses and stage reports bring what is to be known of them.

Every label has few values: a model name that isn't known becomes "other". All times are measured inside one process.
"""

import collections
from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdserve.core.events import EngineLoad, Role, StageReport

CONTENT_TYPE = CONTENT_TYPE_LATEST

OTHER_MODEL = "other"

# Dense where objectives are set: 0.2 s to 2 s to the first token, 20 ms to 100 ms between tokens.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60)
ITL_BUCKETS_S = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800, 3600)
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


def render(registry: CollectorRegistry) -> bytes:
    """Prometheus's text format, of media type CONTENT_TYPE."""
    return generate_latest(registry)


class FrontendMetrics:
    """What a frontend counts: its requests from the first byte to the last, and what it sees of workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: set[str] = set()
        self._ttft = Histogram(
            "pdserve_time_to_first_token_seconds",
            "Request received to first content byte written",
            ["model"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._itl = Histogram(
            "pdserve_inter_token_latency_seconds",
            "From one token of a choice to its next",
            ["model"],
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "pdserve_total_duration_seconds",
            "Request received to its outcome",
            ["model"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._tokens_in = Counter("pdserve_tokens_in", "Prompt tokens of requests", registry=registry)
        self._tokens_out = Counter("pdserve_tokens_out", "Tokens accepted into answers", registry=registry)
        self._overshoot = Counter(
            "pdserve_tokens_overshoot", "Tokens that decode ran beyond the end of an answer", registry=registry
        )
        self._started = Counter("pdserve_requests_started", "Requests admitted", ["model"], registry=registry)
        self._requests = Counter("pdserve_requests", "Requests ended", ["model", "outcome"], registry=registry)
        self._interrupted = Counter(
            "pdserve_stream_interrupted", "Streams that did not end in order", ["cause", "reason"], registry=registry
        )
        self._attempts = Counter("pdserve_attempts", "Attempts at requests", ["reason"], registry=registry)
        self._queue_depth = Gauge("pdserve_queue_depth", "Requests that wait for a worker", registry=registry)
        self._stage = Histogram(
            "pdserve_stage_seconds", "Stages of a request", ["stage"], buckets=STAGE_BUCKETS_S, registry=registry
        )
        self._handoff_bytes = Counter(
            "pdserve_kv_handoff_bytes", "Bytes of KV cache that prefill pushed to decode", registry=registry
        )
        self._worker_up = Gauge(
            "pdserve_worker_up", "Whether a worker takes work", ["role", "worker"], registry=registry
        )
        self._kv_blocks = Gauge(
            "pdserve_kv_blocks", "Blocks of the workers' KV caches", ["role", "state"], registry=registry
        )
        self._sequences = Gauge("pdserve_sequences", "Sequences at workers", ["role", "state"], registry=registry)
        self._queue_tokens = Gauge(
            "pdserve_queue_tokens", "Prompt tokens that wait at workers or are being computed", registry=registry
        )
        self._loop_lag = Histogram(
            "pdserve_event_loop_lag_seconds",
            "How late the event loop runs what is due",
            buckets=LAG_BUCKETS_S,
            registry=registry,
        )

    def know_model(self, model: str) -> None:
        """Give a model that is served a label of its own."""
        self._models.add(model)

    def request_started(self, model: str) -> None:
        self._started.labels(self._label(model)).inc()

    def prompt_read(self, prompt_tokens: int) -> None:
        """A request's prompt has this many tokens."""
        self._tokens_in.inc(prompt_tokens)

    def request_ended(self, model: str, outcome: str, duration_s: float) -> None:
        """`outcome` is "completed", or the code of the error that ended it."""
        label = self._label(model)
        self._requests.labels(label, outcome).inc()
        self._duration.labels(label).observe(duration_s)

    def first_token(self, model: str, ttft_s: float) -> None:
        self._ttft.labels(self._label(model)).observe(ttft_s)

    def next_token(self, model: str, itl_s: float) -> None:
        self._itl.labels(self._label(model)).observe(itl_s)

    def tokens_accepted(self, count: int = 1) -> None:
        self._tokens_out.inc(count)

    def tokens_overshoot(self, count: int = 1) -> None:
        self._overshoot.inc(count)

    def stream_interrupted(self, cause: str, reason: str) -> None:
        """`cause` is "client", "provider" or "timeout"; `reason` an error code."""
        self._interrupted.labels(cause, reason).inc()

    def attempt_started(self, reason: str) -> None:
        """`reason` is "first", or the code of the error that made the attempt before it fail."""
        self._attempts.labels(reason).inc()

    def set_queue_depth(self, requests: int) -> None:
        self._queue_depth.set(requests)

    def stage_took(self, report: StageReport) -> None:
        self._stage.labels(str(report.stage)).observe(report.seconds)
        self._handoff_bytes.inc(report.handoff_bytes)

    def set_loads(self, loads: Iterable[tuple[Role, EngineLoad]]) -> None:
        """What all workers said in their last pulses."""
        blocks: collections.Counter[tuple[Role, str]] = collections.Counter()
        sequences: collections.Counter[tuple[Role, str]] = collections.Counter()
        queued_tokens = 0
        for role, load in loads:
            blocks[role, "free"] += load.free_blocks
            blocks[role, "cached"] += load.cached_blocks
            blocks[role, "used"] += load.total_blocks - load.free_blocks - load.cached_blocks
            sequences[role, "queued"] += load.queued_sequences
            sequences[role, "running"] += load.running_sequences
            queued_tokens += load.queued_tokens
        for gauge, counts, states in (
            (self._kv_blocks, blocks, ("free", "cached", "used")),
            (self._sequences, sequences, ("queued", "running")),
        ):
            for role in Role:
                for state in states:
                    gauge.labels(str(role), state).set(counts[role, state])
        self._queue_tokens.set(queued_tokens)

    def worker_seen(self, role: Role, worker: str, *, up: bool) -> None:
        self._worker_up.labels(str(role), worker).set(up)

    def worker_gone(self, role: Role, worker: str) -> None:
        """It is no member any more: its label goes too."""
        self._worker_up.remove_by_labels({"role": str(role), "worker": worker})

    def loop_lagged(self, lag_s: float) -> None:
        self._loop_lag.observe(lag_s)

    def _label(self, model: str) -> str:
        return model if model in self._models else OTHER_MODEL
