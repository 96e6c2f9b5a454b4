"""A reward without a model, for both sides of benchmarks/grpo_step.py."""

from __future__ import annotations

from typing import Any


def letters(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """The letters e of each completion, text or messages."""
    return [float(str(completion).count("e")) for completion in completions]
