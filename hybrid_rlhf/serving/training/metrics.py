"""Counts of a training server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.serving.metrics import Metrics

_NAMESPACE = "hybrid_rlhf_training"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAUGES = {
    "waiting_tokens": "Tokens of forward and backward passes that wait",
    "requests_in_flight": "Requests without a result",
    "models": "Adapters in training",
    "stored_bytes": "Bytes of sessions, sampling sessions, runs and checkpoints on disk",
}


class TrainingMetrics(Metrics):
    """Metrics of a server that trains adapters."""

    def __init__(self) -> None:
        super().__init__(_NAMESPACE)
        of_tenant = ("tenant",)
        self.trained_tokens = self.counter("trained_tokens", "Tokens of forward and backward passes", of_tenant)
        self.sampled_tokens = self.counter("sampled_tokens", "Tokens sampled", of_tenant)
        self.steps = self.counter("steps", "Optimizer steps", of_tenant)
        self.batch_seconds = self.histogram("batch_seconds", "Time of a packed forward and backward", buckets=_SECONDS)
        self.batch_models = self.histogram(
            "batch_models", "Adapters in a packed batch", buckets=[2**power for power in range(8)]
        )
        self._gauges = {name: self.gauge(name, about, of_tenant) for name, about in _GAUGES.items()}

    def follow(self, tenant: str, **values: Callable[[], float]) -> None:
        """Read the values of a tenant's gauges whenever the metrics are read."""
        for name, value in values.items():
            self._gauges[name].labels(tenant).set_function(value)

    def value(self, name: str, tenant: str) -> float:
        """The current value of a counter or gauge of a tenant; 0 before its first count."""
        return self.registry.get_sample_value(f"{_NAMESPACE}_{name}", {"tenant": tenant}) or 0.0
