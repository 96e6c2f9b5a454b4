"""Configs of the inference entry points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_rlhf.configs.rules import require, require_template_variables


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled."""

    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.7
    """Logits are divided by this; 0 takes the likeliest token always."""
    top_p: float = 0.95
    """Sample from the smallest set of tokens with this probability; 1 samples from all."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 samples from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability; 0 samples from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that were there before are divided by it where positive, else multiplied; 1 is none."""
    min_new_tokens: int = 0
    """No answer ends before this many tokens."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    seed: int | None = None
    """Seed of the sampling; none: a new one each time."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens must be 1 or more, got {self.max_new_tokens}: raise it")
        require(self.temperature >= 0, f"temperature must be 0 or more, got {self.temperature}: give for example 0.7")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}: give 1 to sample from all")
        require(self.top_k >= 0, f"top_k must be 0 or more, got {self.top_k}: give 0 to sample from all")
        require(0 <= self.min_p < 1, f"min_p must be in [0, 1), got {self.min_p}: give 0 to sample from all")
        require(
            self.repetition_penalty > 0,
            f"repetition_penalty must be above 0, got {self.repetition_penalty}: give 1 for none",
        )
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be 0 to max_new_tokens, got {self.min_new_tokens}: lower it",
        )


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Which model answers, where, and how."""

    path: str = ""
    """Model: a folder that a step saved, a hub name, a .gguf file, or "embedded"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; none: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}; those of training come with the model."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        require_template_variables(self.chat_template_kwargs)
        require(bool(self.path), "a model must be named, got none: give its folder, for example output/step3_ppo/actor")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """Talk to a model in the terminal."""

    system: str | None = None
    """System prompt; none: the chat template's own."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """Complete the prompts of a file: JSON lines in, JSON lines out."""

    input: str = ""
    """Source of prompts: a file, folder or hub name with a `prompt` or `messages` column."""
    output: str = ""
    """JSONL file to write: the input's columns, and `completions`."""
    n: int = 1
    """Completions of each prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.input) and bool(self.output), "--input and --output must name files: give both")
        require(self.n >= 1, f"n must be 1 or more, got {self.n}: raise it")
