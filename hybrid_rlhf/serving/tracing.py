"""Spans of requests for OpenTelemetry, where its API is installed; without a configured SDK they are recorded nowhere.

`opentelemetry-instrument hybrid-rlhf serve MODEL` configures the SDK from the variables OTEL_*. A span continues the
trace of the client (the header `traceparent`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:  # an optional package
    trace = None  # type: ignore[assignment]


def begin_span(method: str, headers: Mapping[str, str]) -> Any:
    """Begin the span of a request; None without OpenTelemetry."""
    if trace is None:
        return None
    context = propagate.extract(headers)
    return trace.get_tracer("hybrid_rlhf").start_span(method, context=context, kind=trace.SpanKind.SERVER)


def end_span(span: Any, method: str, route: str, status: int) -> None:
    """End the span of a request, named by its route, with OpenTelemetry's names of attributes."""
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    span.end()
