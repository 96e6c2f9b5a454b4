"""Answers as JSON for any browser: numbers that are not finite are null, and texts may contain any character.

Images are JPEG.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Path, Response

from hybrid_rlhf.runtime.output import json_text

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
"""Of an image, in the path of a request."""


def answer(content: Any, status: int = 200) -> Response:
    """An answer in ASCII JSON, as samples may have lone surrogates, which UTF-8 cannot encode."""
    try:
        text = json.dumps(content, allow_nan=False, default=str)  # curves are long
    except ValueError:
        text = json_text(content)
    return Response(text, status, media_type="application/json")


def picture(jpeg: bytes) -> Response:
    """An image, which its address determines."""
    return Response(jpeg, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


def error_answer(message: str, status: int) -> Response:
    """An error as one line."""
    return answer({"error": " ".join(message.split())}, status)
