"""Answers as JSON for any browser: numbers that are not finite are null, and texts may contain any character."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response

from hybrid_rlhf.runtime.output import json_text


def answer(content: Any, status: int = 200) -> Response:
    """An answer in ASCII JSON, as samples may have lone surrogates, which UTF-8 cannot encode."""
    try:
        text = json.dumps(content, allow_nan=False, default=str)  # curves are long
    except ValueError:
        text = json_text(content)
    return Response(text, status, media_type="application/json")


def error_answer(message: str, status: int) -> Response:
    """An error as one line."""
    return answer({"error": " ".join(message.split())}, status)
