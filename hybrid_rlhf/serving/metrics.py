"""Counts and times of a server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybrid_rlhf.serving.turns import Turns

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Values of /metrics, of one server."""

    def __init__(self, namespace: str) -> None:
        """Take the beginning of all names."""
        self.registry = CollectorRegistry()
        of_server: dict[str, Any] = {"namespace": namespace, "registry": self.registry}
        self.counter: Callable[..., Counter] = partial(Counter, **of_server)
        self.gauge: Callable[..., Gauge] = partial(Gauge, **of_server)
        self.histogram: Callable[..., Histogram] = partial(Histogram, **of_server)
        self.requests = Counter("requests", "Requests by path and HTTP status", ("path", "status"), **of_server)

    async def answer(self) -> Response:
        """GET /metrics: the current values."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")


class ServerMetrics(Metrics):
    """Metrics of a server that generates, or scores."""

    def __init__(self, turns: Turns | None) -> None:
        """Take what submits requests to the batch, whose load is read with the metrics; None: nothing is generated."""
        super().__init__("hybrid_rlhf")
        if turns is not None:
            batch = turns.batch
            self.gauge("rows_running", "Completions that are decoded").set_function(lambda: batch.load.rows)
            self.gauge("rows_waiting", "Completions that wait for a row or for memory").set_function(
                lambda: max(0, turns.unfinished - batch.load.rows)
            )
            self.gauge("kv_cache_used_ratio", "Part of the KV cache that running completions hold").set_function(
                lambda: batch.load.used_pages / max(1, batch.load.pages)
            )
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of accepted prompts")
        self.completion_tokens = self.counter("completion_tokens", "Tokens sampled")
        self.first_token_seconds = self.histogram(
            "first_token_seconds", "From a request to its first token", buckets=_SECONDS
        )
        self.request_seconds = self.histogram("request_seconds", "From a request to its last token", buckets=_SECONDS)
