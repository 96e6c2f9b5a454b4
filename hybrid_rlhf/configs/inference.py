"""Settings of the inference commands, chat and generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rlhf.configs.sections.rules import require, require_template_variables, setting
from hybrid_rlhf.configs.sections.sampling import SamplingParams

_CHAT_KEYS = tuple(name for name in vars(SamplingParams()) if name != "n")


def _chat_sampling() -> SamplingParams:
    return SamplingParams(max_new_tokens=256, temperature=0.7, top_p=0.95)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """The model, where it runs and how it samples."""

    path: str = ""
    """Model: a folder that a step saved, a hub name, a .gguf file, or "embedded"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; null: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = setting(default_factory=dict, advanced=True)
    """Variables of the chat template, such as {enable_thinking: false}; those of training come with the model."""
    sampling: SamplingParams = setting(default_factory=_chat_sampling)

    def __post_init__(self) -> None:
        require_template_variables(self.chat_template_kwargs)
        require(bool(self.path), "a model must be named, got none: give its folder, for example output/step3_ppo/actor")
        require(
            self.sampling.min_new_tokens <= self.sampling.max_new_tokens,
            f"sampling.min_new_tokens must be at most max_new_tokens {self.sampling.max_new_tokens}, got "
            f"{self.sampling.min_new_tokens}: lower it",
        )


@dataclass(frozen=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """Chat with a model in the terminal."""

    system: str | None = None
    """System prompt; null: the chat template's own."""
    sampling: SamplingParams = setting(default_factory=_chat_sampling, keys=_CHAT_KEYS)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """Complete the prompts of a file: JSON lines in, JSON lines out."""

    input: str = ""
    """Source of prompts: a file, folder or hub name with a `prompt` or `messages` column."""
    output: str = ""
    """JSONL file to write: the input's columns, and `completions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.input) and bool(self.output), "--input and --output must name files: give both")
