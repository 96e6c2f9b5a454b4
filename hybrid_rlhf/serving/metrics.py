"""Counts and times of a server, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_rlhf.generation.open_batch import RequestBatch

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Values of /metrics."""

    def __init__(self, batch: RequestBatch | None) -> None:
        """Take the batch, whose load is read with the metrics; None if nothing is generated."""
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"hybrid_rlhf_{name}", text, registry=self._registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"hybrid_rlhf_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"hybrid_rlhf_{name}", text, registry=self._registry, buckets=_SECONDS)

        if batch is not None:
            gauge("rows_running", "Completions that are decoded").set_function(lambda: batch.load.rows)
            gauge("rows_waiting", "Completions that wait for a row or for memory").set_function(
                lambda: max(0, batch.unfinished - batch.load.rows)
            )
            gauge("kv_cache_used_ratio", "Part of the KV cache that running completions hold").set_function(
                lambda: batch.load.used_pages / max(1, batch.load.pages)
            )
        self.requests = counter("requests", "Requests by path and HTTP status", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts")
        self.completion_tokens = counter("completion_tokens", "Tokens sampled")
        self.first_token_seconds = histogram("first_token_seconds", "From a request to its first token")
        self.request_seconds = histogram("request_seconds", "From a request to its last token")

    def text(self) -> bytes:
        """The current values as text."""
        return generate_latest(self._registry)
