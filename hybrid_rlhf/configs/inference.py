"""Settings of the inference commands, chat, generate and serve."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rlhf.configs.files.credentials import fill_placeholders, placeholders
from hybrid_rlhf.configs.sections.rules import require, require_template_variables, setting
from hybrid_rlhf.configs.sections.sampling import SamplingParams

_SERVE_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
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


@dataclass(frozen=True, kw_only=True)
class ServeConfig(InferenceConfig):
    """Serve a model over HTTP with OpenAI's API."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all interfaces, which needs an api_key unless the network is private."""
    port: int = 8000
    """Port to listen on; 0: any that is free."""
    api_key: str | None = None
    """What requests must send as a bearer token, usually ${NAME} of an environment variable; null: nothing."""
    model_name: str | None = None
    """Name of the model in requests; null: its path."""
    adapters: dict[str, str] = setting(default_factory=dict)
    """LoRA adapters over the model, peft folders by the names that requests give; each has a KV cache of its own, of
    kv_cache_gib."""
    reward_model: str | None = None
    """Reward model that scores conversations at /score: a folder or hub name, which is also its name in requests."""
    max_queue: int = 256
    """Most completions that wait; a request beyond is refused with status 429."""
    max_batch_rows: int = 64
    """Most completions that are decoded together."""
    max_sequence_tokens: int = 4096
    """Most tokens of a prompt and its completion together."""
    kv_cache_gib: float | None = setting(None, advanced=True)
    """Memory for keys and values, in GiB; null: what is free on the device, up to all rows at their full length."""
    shutdown_seconds: int = setting(30, advanced=True)
    """Time in which requests may finish after SIGTERM or SIGINT."""
    sampling: SamplingParams = setting(default_factory=lambda: SamplingParams(max_new_tokens=512), keys=_SERVE_KEYS)
    """For what a request does not name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.port < 65536, f"port must be in 0..65535, got {self.port}: choose another")
        for name, least in (
            ("max_queue", 0),
            ("max_batch_rows", 1),
            ("max_sequence_tokens", 2),
            ("shutdown_seconds", 1),
        ):
            value = getattr(self, name)
            require(value >= least, f"{name} must be {least} or more, got {value}: raise it")
        require(
            self.kv_cache_gib is None or self.kv_cache_gib > 0,
            f"kv_cache_gib must be above 0, got {self.kv_cache_gib}: raise it, or leave it out",
        )
        require(self.api_key is None or bool(self.api_key), "api_key must not be empty: give a key, or leave it out")
        require(
            not self.adapters or self.kv_cache_gib is not None,
            "kv_cache_gib must be given with adapters, which have a KV cache each, got none: give the GiB of each",
        )
        require(
            (self.model_name or self.path) not in self.adapters,
            f"adapters must have other names than the model, got {self.model_name or self.path}: rename one",
        )

    def expanded_api_key(self) -> str | None:
        """The API key with the values of its environment variables; never log it."""
        if self.api_key is None:
            return None
        values = {name: os.environ.get(name, "") for name in placeholders(self.api_key)}
        for name, value in values.items():
            require(bool(value), f"api_key: ${{NAME}} must be a set variable, {name} is not set: export {name}=...")
        return fill_placeholders(self.api_key, values)
