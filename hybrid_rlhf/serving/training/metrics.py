"""Counts of a training server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class TrainingMetrics:
    """Values of /metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hybrid_rlhf_training_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"hybrid_rlhf_training_{name}", text, registry=self._registry, buckets=tuple(buckets))

        self.requests = counter("requests", "Requests by path and HTTP status", "path", "status")
        self.trained_tokens = counter("trained_tokens", "Tokens of forward and backward passes", "tenant")
        self.sampled_tokens = counter("sampled_tokens", "Tokens sampled", "tenant")
        self.steps = counter("steps", "Optimizer steps", "tenant")
        self.batch_seconds = histogram("batch_seconds", "Time of a packed forward and backward", _SECONDS)
        self.batch_models = histogram("batch_models", "Adapters in a packed batch", [2**n for n in range(8)])
        self._gauges = {
            name: Gauge(f"hybrid_rlhf_training_{name}", text, ("tenant",), registry=self._registry)
            for name, text in (
                ("waiting_tokens", "Tokens of forward and backward passes that wait"),
                ("requests_in_flight", "Requests without a result"),
                ("models", "Adapters in training"),
                ("stored_bytes", "Bytes of checkpoints"),
            )
        }

    def follow(self, name: str, tenant: str, value: Callable[[], float]) -> None:
        """Read the value of a gauge of a tenant whenever the metrics are read."""
        self._gauges[name].labels(tenant).set_function(value)

    def value(self, name: str, tenant: str) -> float:
        """The current value of a counter or gauge of a tenant; 0 before its first count."""
        return self._registry.get_sample_value(f"hybrid_rlhf_training_{name}", {"tenant": tenant}) or 0.0

    def text(self) -> bytes:
        """The current values as text."""
        return generate_latest(self._registry)
