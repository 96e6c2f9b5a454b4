"""Settings of the commands on saved models: chat, generate, serve, train-server, evaluate, export, push."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, Literal

from hybrid_rlhf.configs.credentials import expanded, is_own_host
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.rewards import VERIFIERS, require_output
from hybrid_rlhf.configs.sections.rules import (
    Count,
    FloatType,
    Natural,
    Port,
    Positive,
    RowTokens,
    Settings,
    advanced,
    nearest_hint,
    require,
    require_defaults,
    require_template_variables,
    section,
    setting,
)
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig

_SERVE_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATING_KEYS = (
    "adapters",
    "adapters_from",
    "follow",
    "allow_lark",
    "reward_model",
    "max_batch_rows",
    "max_sequence_tokens",
    "max_image_pixels",
    "kv_cache_gib",
    "sampling",
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
_CHAT_KEYS = tuple(key.name for key in fields(SamplingParams) if key.name != "n")
_CHAT_DEFAULTS = {"max_new_tokens": 256, "temperature": 0.7, "top_p": 0.95}
_MEASURES = {"win_rate": "against", "pass_rate": "reward"}  # nosec B105
"""The key that a measure needs besides rows; measures that are not listed need none."""


_NO_MODEL = "a model must be named, got none: give its folder, for example output/step3_ppo/actor"


class SavedModelConfig(Settings):
    """A saved model, and where it runs."""

    path: str = ""
    """Model: a folder that a step saved, a hub name, a .gguf file, or "embedded"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU if there is one."""
    dtype: FloatType = "auto"
    """Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template; null: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = advanced({})
    """Variables of the chat template, such as {enable_thinking: false}; the saved model already contains those of
    training."""

    def _check(self) -> None:
        require(self.path, _NO_MODEL)
        require_template_variables(self.chat_template_kwargs)


class InferenceConfig(SavedModelConfig):
    """A saved model, and how it samples."""

    max_image_pixels: Count = advanced(2**20)
    """Width times height to which larger images are scaled down, before the model's processor scales them."""
    sampling: SamplingParams = setting(_CHAT_DEFAULTS)

    def _check(self) -> None:
        require(
            self.sampling.min_new_tokens <= self.sampling.max_new_tokens,
            f"sampling.min_new_tokens must be at most max_new_tokens {self.sampling.max_new_tokens}, got "
            f"{self.sampling.min_new_tokens}: lower it",
        )


class ChatConfig(InferenceConfig):
    """Chat with a model in the terminal."""

    compare: str | None = None
    """A second model that answers the same messages; also as the second positional argument."""
    system: str | None = None
    """System prompt; null: the chat template's own."""
    image: list[str] = []
    """Files of images that go with the first message."""
    sampling: SamplingParams = setting(_CHAT_DEFAULTS, keys=_CHAT_KEYS)


class GenerateConfig(InferenceConfig):
    """Complete a prompt, or the prompts of a file: JSON lines in, JSON lines out."""

    prompt: str | None = None
    """Text of a single prompt, in place of input; its completions are printed unless there is an output."""
    image: list[str] = []
    """Files of images that go with the prompt."""
    input: str | None = None
    """Source of prompts: a file, folder or hub name with a `prompt` or `messages` column, and `images` if the model
    reads them."""
    output: str | None = None
    """JSONL file to write: the input's columns, and `completions`."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def _check(self) -> None:
        require(
            self.prompt is None or self.input is None,
            f"generate takes --prompt or --input, got both, input {self.input}: leave one out",
        )
        require(
            self.prompt is not None or (self.input is not None and self.output is not None),
            "generate needs --prompt TEXT, or --input and --output with names of files: give one of the two",
        )
        require(
            self.prompt is not None or not self.image,
            f"image goes with prompt, got {', '.join(self.image)} for input {self.input}: add column 'images' to it",
        )


class ServerConfig(SavedModelConfig):
    """A saved model, and the server that requests reach it by."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all interfaces. An address that other machines can reach needs a key."""
    port: Port = 8000
    """Port to listen on; 0: any free port."""
    model_name: str | None = None
    """Name of the model in requests; null: its path."""
    max_batch_rows: Count = 64
    """Maximum number of completions decoded together."""
    shutdown_seconds: Count = advanced(30)
    """Time for requests to finish after SIGTERM or SIGINT."""

    @property
    def served_name(self) -> str:
        """Name of the model in requests."""
        return self.model_name or self.path.rstrip("/")


class ServeConfig(ServerConfig):
    """Serve a model over HTTP with OpenAI's API, or a reward model that scores conversations."""

    api_key: str | None = None
    """Required bearer token of requests, usually ${NAME} of an environment variable; null: none."""
    cors_origins: list[str] = advanced([])
    """Origins of pages on other sites that may send requests, such as https://app.example; empty: none may."""
    access_log: bool = advanced(False)
    """Log method, path, status and seconds of each request on stderr."""
    adapters: dict[str, str] = {}
    """LoRA adapters of the model: peft folders by the names that requests use."""
    adapters_from: str | None = advanced(None)
    """Folder of the LoRA adapters that requests may load, replace and unload at /v1/adapters; null: none may."""
    follow: str | None = None
    """Folder of a run that trains the served model: the weights or the adapter of its newest checkpoint are served;
    null: the model stays as it is."""
    allow_lark: bool = advanced(False)
    """Let requests have grammars in Lark, whose regular expressions may take all of their limits of time and memory."""
    reward_model: str | None = None
    """Reward model that scores conversations at /score: a folder or hub name, which is also its name in requests."""
    max_queue: Natural = 256
    """Maximum number of waiting completions, and of waiting requests for scores; further requests are rejected with
    status 429."""
    max_sequence_tokens: RowTokens = 4096
    """Maximum number of tokens of a prompt and its completion together."""
    max_image_pixels: Count = advanced(2**20)
    """Width times height to which larger images are scaled down, before the model's processor scales them."""
    kv_cache_gib: Positive | None = advanced(None)
    """Memory for keys and values, in GiB; null: the size for all rows at maximum length, at most 0.9 of the free memory
    of a GPU or 0.125 of that of a host, unless one row needs more."""
    sampling: SamplingParams = setting({"max_new_tokens": 512}, keys=_SERVE_KEYS)
    """Sampling parameters of requests that do not set their own."""

    def _check(self) -> None:
        require(
            self.api_key is not None or is_own_host(self.host),
            f"a server that other machines reach needs an api_key, got host {self.host} without one: give --api_key "
            "'${NAME}', or leave host out",
        )
        for origin in self.cors_origins:
            require(
                _ORIGIN.fullmatch(origin),
                f"cors_origins must be SCHEME://HOST or SCHEME://HOST:PORT each, got {origin}: write it out",
            )
        require(
            self.served_name not in self.adapters,
            f"adapters must have other names than the model, got {self.served_name}: rename one",
        )
        for name in self.adapters:
            require(
                not {".", ".."} & {*name.split("/")},
                f"adapters must have names without parts . and .., which clients remove from a URL, got {name}: "
                "rename it",
            )
        require(
            self.adapters_from is None or self.api_key is not None,
            f"adapters_from needs an api_key, got {self.adapters_from} without one: give --api_key '${{NAME}}'",
        )

    def check_scores_alone(self) -> None:
        """Raise UserError for keys that have no effect when a reward model is served alone."""
        require_defaults(self, _GENERATING_KEYS, f"{self.path} is a reward model, which generates nothing")


class TrainServerConfig(ServerConfig):
    """Train and sample many adapters of one model over HTTP, with the API of Tinker's client."""

    output_dir: str = "train_server"
    """Folder of sessions, runs and checkpoints, which a server that starts again continues with."""
    port: Port = 8077
    api_keys: dict[str, str] = {}
    """Keys that clients must have, by the names of their tenants; each begins with tml- and is usually ${NAME} of an
    environment variable; none: any such key, for one tenant."""
    adapters: dict[str, str] = {}
    """Adapters that all clients may begin with: peft folders by NAME, as tinker://server/weights/NAME."""
    max_sequence_tokens: RowTokens = 4096
    """Maximum number of tokens of a row, and of a prompt and its completion."""
    micro_batch_tokens: RowTokens = 8192
    """Tokens of a packed forward and backward; the rows of all clients that wait take turns in it."""
    max_resident_adapters: Count = 16
    """Adapters in training that stay on the device, and as many for sampling; others wait in host memory or on disk."""
    kv_cache_gib: Positive | None = advanced(None)
    """Memory for keys and values, in GiB; null: as for serve, in half of the free memory of a GPU."""
    max_requests: Count = 4096
    """Requests without a result that a key may have; further ones are rejected with status 429."""
    max_queued_mib: Positive = 512.0
    """Their bodies together, in MiB."""
    max_body_mib: Positive = 64.0
    """Largest body of a request, in MiB."""
    max_models: Count = 16
    """Adapters in training that a key may have at a time."""
    max_stored_gib: Positive = 64.0
    """Checkpoints that a key may have, in GiB."""
    deterministic: bool = advanced(False)
    """Compute the rows of each command apart from those of others, so that an adapter's weights are bit for bit those
    of training alone."""
    session_minutes: Positive = advanced(60.0)
    """Time without a heartbeat or a command of a client after which its models leave the server; their checkpoints
    stay."""

    def _check(self) -> None:
        require(
            self.api_keys or is_own_host(self.host),
            f"a server that other machines reach needs api_keys, got host {self.host} without any: give "
            "--api_keys '{NAME: ${KEY}}', or leave host out",
        )
        for key, pattern in (("api_keys", r"[\w.-]{1,64}"), ("adapters", r"\w[\w.-]{0,127}")):
            for name in getattr(self, key):
                require(
                    re.fullmatch(pattern, name),
                    f"{key} are by names of letters, digits, _, . and -, got {name}: choose another",
                )
        require(
            self.micro_batch_tokens >= self.max_sequence_tokens,
            f"micro_batch_tokens must be at least max_sequence_tokens {self.max_sequence_tokens}, got "
            f"{self.micro_batch_tokens}: raise it",
        )

    def expanded_api_keys(self) -> dict[str, str]:
        """The API keys with their environment variables replaced; they must not be logged.

        Raises:
            UserError: for a key that the client does not accept, or two equal ones.
        """
        keys = {name: expanded(key, key=f"api_keys.{name}") for name, key in self.api_keys.items()}
        for name, key in keys.items():
            require(
                key.startswith("tml-") and len(key) >= 12,
                f"api_keys.{name} must begin with tml- and have at least 12 characters, it does not: choose another",
            )
        require(len(set(keys.values())) == len(keys), "api_keys must differ, got two equal ones: choose another")
        return keys


class WinRateJudgeConfig(JudgeConfig):
    """Judge of two completions: a reward model, or a language model, behind OpenAI's API or in this process."""

    model: str | None = None
    """Reward model: a folder or hub name; the higher score wins."""

    def _check(self) -> None:
        if self.model is not None:
            require(not self.url, f"judge takes one of model and url, got {self.model} and a URL: leave one out")
            unread = [key.name for key in fields(JudgeConfig) if key.name not in ("mode", "explain")]
            rule = "a reward model as judge has no other keys"
            require_defaults(self, unread, rule, others={"mode": "pairwise", "explain": True})


class EvaluateConfig(InferenceConfig):
    """Evaluate a saved model on held-out rows, or against another model."""

    retired = dict.fromkeys(
        ("tasks", "tasks_folder", "few_shot", "apply_chat_template", "inspect_tasks"),
        "start `hybrid-rlhf serve`, and run lm_eval or inspect on it, see docs/serving.md#evaluation-harnesses",
    )
    measure: Literal["auto", "perplexity", "accuracy", "win_rate", "pass_rate"] = "auto"
    """perplexity: assistant tokens in conversations; accuracy: reward model on preference pairs; win_rate: against
    another model, by a judge; pass_rate: pass@k and avg@n of a verified reward. auto: inferred from the other keys,
    else accuracy for a reward model and perplexity for other models."""
    data: list[str] = []
    """Rows with the columns of the corresponding step: files, folders or hub names."""
    max_rows: Count | None = None
    """Number of rows to read, from the beginning of the data; null: all."""
    max_length: RowTokens = 1024
    """Longest row, in tokens; longer conversations and pairs are truncated and counted, longer prompts are rejected."""
    batch_rows: Count = advanced(8)
    """Rows in one forward pass."""
    against: str | None = None
    """The other model for win_rate."""
    judge: WinRateJudgeConfig = section(mode="pairwise", explain=True)
    """Judge of win_rate."""
    reward: str | None = None
    """Reward for pass_rate: a function as module:function or path/to/file.py:function, or a verifier, math or code."""
    sandbox: SandboxConfig = advanced({})
    """Where and within which limits a verifier runs programs."""
    pass_score: float = 1.0
    """Completions with at least this reward pass."""
    k: list[Count] = [1]
    """The k of pass@k, each at most sampling.n."""
    seed: Natural = 0
    """Seed of the sampling and of the bootstrap."""
    output: str | None = None
    """JSON file to write, with the results, settings and versions; null: none."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def _check(self) -> None:
        require(self.k, "k must be numbers of 1 or more, got none: give for example [1, 4]")
        keys = {measure: key for measure, key in _MEASURES.items() if getattr(self, key)}
        require(
            self.measure in keys or self.measure not in _MEASURES,
            f"{self.measure} needs --{_MEASURES.get(self.measure)}, got none: give it",
        )
        for measure, key in keys.items():
            require(
                self.measure in ("auto", measure),
                f"{key} goes with measure {measure}, got {self.measure}: leave one out",
            )
        require(len(keys) <= 1, f"one measure at a time, got {' and '.join(keys.values())}: leave out all but one")
        if self.chosen != "win_rate":
            require_defaults(self, ["judge"], "judge goes with win_rate and --against")
        require(
            self.reward in VERIFIERS or self.sandbox == SandboxConfig(),
            f"sandbox goes with the rewards {' and '.join(VERIFIERS)}, got {self.reward}: leave it out",
        )
        if self.reward in VERIFIERS:
            require_output(self.sandbox, str(self.reward))
        elif self.reward is not None:
            require(
                ":" in self.reward,
                f"reward must be a function, such as rewards.py:correct, or a verifier, {' or '.join(VERIFIERS)}, got "
                f"{self.reward}: {nearest_hint(self.reward, VERIFIERS, otherwise='give one of them')}",
            )
        if self.chosen == "win_rate":
            require(
                self.judge.model is not None or self.judge.path or self.judge.url,
                "win_rate needs a judge, got none: give --judge.model REWARD_MODEL, --judge.path MODEL or --judge.url "
                "URL",
            )
            require(
                self.sampling.n == 1,
                f"win_rate compares one completion per prompt, got sampling.n {self.sampling.n}: leave it out",
            )
        require(self.data, "evaluate needs rows, got none: give --data FILE")
        require(
            self.chosen != "pass_rate" or max(self.k) <= self.sampling.n,
            f"k must be at most sampling.n {self.sampling.n}, got {max(self.k)}: raise --sampling.n",
        )

    @property
    def chosen(self) -> str:
        """The measure that the other keys imply; auto if it depends on the kind of model."""
        implied = (measure for measure, key in _MEASURES.items() if getattr(self, key))
        return next(implied, "auto") if self.measure == "auto" else self.measure


class ExportConfig(Settings):
    """Export a model: merged adapters, another dtype, shards, or one GGUF file."""

    retired = {
        "modelfile": "export the file, and run `ollama create` with FROM and its name, see docs/saved_models.md#export",
        "check_vllm": "export the folder, and run `vllm serve` with its name, see docs/saved_models.md#export",
    }
    path: str = ""
    """Model: a folder that a step saved, a hub name, a .gguf file, or "embedded"."""
    output: str = ""
    """Output: a folder or a .gguf file, which must not exist."""
    format: Literal["safetensors", "gguf"] = "safetensors"
    """safetensors: a Hugging Face folder; gguf: one file for llama.cpp and programs based on it."""
    dtype: Literal["stored", "float32", "bfloat16", "float16", "q8_0"] = "stored"
    """Type of the weights; stored: unchanged. q8_0 (8 bits in blocks of 32) is only for gguf."""
    adapter: str | None = None
    """PEFT adapter to merge into the model: a folder with adapter_config.json."""
    shard_gib: Positive = 4.0
    """Largest weights file of a folder, in GiB."""
    check: bool = False
    """Compare the greedy tokens of the exported model on ten prompts with those of the source: in transformers, or in
    llama.cpp for gguf. A difference beyond rounding is exit code 1."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    def _check(self) -> None:
        require(self.path, _NO_MODEL)
        require(self.output, "--output must name what to write, got none: give a folder or a .gguf file")
        is_gguf = self.format == "gguf"
        require(
            is_gguf == self.output.endswith(".gguf"),
            f"output of format {self.format} {'ends' if is_gguf else 'does not end'} with .gguf, got {self.output}: "
            "change --output or --format",
        )
        require(
            is_gguf or self.dtype != "q8_0",
            "dtype q8_0 is for format gguf, got safetensors: set --format gguf",
        )


class PushConfig(Settings):
    """Upload a saved model to the Hugging Face hub."""

    path: str = ""
    """Folder of the model; only the model's own files and its README.md are uploaded."""
    repo: str = ""
    """Repository, as USER/NAME; it is created if it does not exist."""
    private: bool = False
    """Make a newly created repository private."""
    message: str = "Upload model"
    """Message of the commit."""

    def _check(self) -> None:
        require(self.path, _NO_MODEL)
        require(
            re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", self.repo),
            f"a repository is USER/NAME, got {self.repo or 'none'}: give it after the folder",
        )
