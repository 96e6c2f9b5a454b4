"""Answers as JSON for any browser: numbers that are not finite are null, and texts may contain any character."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import Response


def answer(content: Any, status: int = 200) -> Response:
    """An answer in ASCII JSON, as samples may have lone surrogates, which UTF-8 cannot encode."""
    try:
        text = json.dumps(content, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(content), allow_nan=False, default=str)
    return Response(text, status, media_type="application/json")


def error_answer(message: str, status: int) -> Response:
    """An error as one line."""
    return answer({"error": " ".join(message.split())}, status)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
