"""Settings of sampling in RL: prompts per step, sampling parameters, memory and asynchrony."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hybrid_rlhf.configs.credentials import check_url, require_placeholder
from hybrid_rlhf.configs.sections.rules import (
    Count,
    FloatType,
    Natural,
    Port,
    Positive,
    PositiveShare,
    Settings,
    Share,
    ShareBelowOne,
    advanced,
    require,
    require_defaults,
    setting,
    whole_number,
)
from hybrid_rlhf.configs.sections.sampling import SamplingParams, require_sampled

ROLLOUT_SAMPLING_KEYS = ("n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "response_format")
"""Sampling parameters that rollouts read. Penalties and forced lengths change the distribution in ways that training
does not recompute; the seed follows the run's. A response format changes it too: algorithm.correction weighs its
tokens.
"""


_FEWEST_PROMPTS = 64
"""Smallest default of prompts per rollout, with several completions per prompt."""
_COMPARED_COMPLETIONS = 16
"""Minimum number of completions per rollout whose experts are compared with those of training."""


class CurriculumConfig(Settings):
    """Prompts that the actor nearly always or hardly ever answers are skipped, by the running pass rate of each
    (docs/algorithms.md#curriculum).
    """

    pass_score: float = 0.5
    """A completion passes if its score, without penalties, is above this."""
    min_pass_rate: Share = 0.1
    """Prompts with a lower pass rate are skipped."""
    max_pass_rate: Share = 0.9
    """Prompts with a higher pass rate are skipped."""
    decay: ShareBelowOne = 0.5
    """Weight of the earlier pass rate at each further visit of a prompt; 0: the last visit alone."""
    revisit: PositiveShare = 0.1
    """Probability that a prompt that would be skipped is taken all the same, so that its pass rate is renewed."""

    def _check(self) -> None:
        require(
            self.min_pass_rate <= self.max_pass_rate,
            f"rollout.curriculum.min_pass_rate must be at most max_pass_rate {self.max_pass_rate}, got "
            f"{self.min_pass_rate}: lower it",
        )


class EndpointConfig(Settings):
    """Address at which programs query the actor during a rollout, with OpenAI's API (docs/environments.md#programs)."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all interfaces."""
    port: Port = 0
    """Port of the first rank of a host; each further rank adds its index on the host. 0: any free port."""
    api_key: str | None = None
    """Bearer token of requests, as ${NAME} of an environment variable; null: a random key with environment.program,
    else none."""

    def _check(self) -> None:
        require_placeholder(self.api_key, key="rollout.endpoint.api_key")


class VLLMConfig(Settings):
    """Sampling by vLLM: a server that each rank starts, or servers by URL (docs/vllm.md)."""

    python: str | None = None
    """Interpreter of an environment with vLLM, which each sampling rank starts for its own server; null: urls."""
    urls: tuple[str, ...] = ()
    """Addresses of running vLLM servers, such as http://host:8000, which share the completions; ${NAME} is replaced
    from the environment."""
    api_key: str | None = None
    """Bearer token of requests to urls, as ${NAME} of an environment variable; null: none."""
    folder: str | None = None
    """Folder in which weights are written for the servers, which must see it under the same path; null: shared memory
    of this host."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the servers that ranks start, such as --enforce-eager."""

    def _check(self) -> None:
        require(
            (self.python is None) != (not self.urls),
            f"rollout.vllm needs either python or urls, got {'none' if self.python is None else 'both'}: give one",
        )
        require(
            self.python is None or self.api_key is None,
            "rollout.vllm.api_key is for servers of rollout.vllm.urls, got rollout.vllm.python: leave it out",
        )
        require(
            self.python is not None or not self.arguments,
            f"rollout.vllm.arguments are for servers that ranks start, got {list(self.arguments)} and urls: give them "
            "where you start those",
        )
        require_placeholder(self.api_key, key="rollout.vllm.api_key")
        for url in self.urls:
            check_url(url, key="rollout.vllm.urls", remedy="write ${NAME} of a variable in its place")


def _prompts_per_step(values: Mapping[str, Any]) -> int:
    """Default number of prompts: fewer with several completions of each, but not too few."""
    prompts = whole_number(values["prompts_per_step"])
    n = whole_number(values["sampling.n"])
    return max(_FEWEST_PROMPTS, prompts // n) if n > 1 else prompts


class RolloutConfig(Settings):
    """How completions are sampled."""

    following = {"prompts_per_step": _prompts_per_step}

    prompts_per_step: Count = 256
    """Prompts per rollout, over all ranks; default: 256 completions, but at least 64 prompts."""
    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens; data.too_long determines what happens to longer prompts."""
    sampling: SamplingParams = setting({"max_new_tokens": 512}, keys=ROLLOUT_SAMPLING_KEYS)
    tensor_parallel: Count = setting(1, mutable=True)
    """Number of ranks that share one model in generation; must divide the number of ranks."""
    backend: Literal["auto", "module", "vllm"] = advanced("auto")
    """auto: the generation engine if it supports the model, vLLM if rollout.vllm is given; module: always the model's
    own forward; vllm: the servers of rollout.vllm."""
    vllm: VLLMConfig | None = advanced(None, mutable=True)
    dtype: FloatType = advanced("auto")
    """Type of the inference weights; auto: as in training."""
    quantization: Literal["int8", "fp8"] | None = advanced(None)
    """8-bit matrix multiplications in the layers during sampling (on a CPU int8); training weights and the head keep
    their type. null: none."""
    routing_replay: bool = advanced(False)
    """Scoring and training reuse the experts chosen during sampling (R3, arXiv 2510.11370). For mixtures of experts
    with rollout/router_agreement below 1 and noisy ratios. Takes one byte of host memory on each rank per token, layer
    and chosen expert, two bytes above 128 experts."""
    kv_cache_gib: Positive | None = setting(None, mutable=True)
    """KV cache per rank, in GiB; null: half of the free memory on a CPU; 0.9 of it on a GPU, minus the memory of a
    prefill, of tables and of CUDA graphs."""
    max_decode_rows: Count | None = advanced(None, mutable=True)
    """Maximum number of completions that a rank decodes together; null: limited only by memory."""
    prefill_tokens: Count | None = advanced(None, mutable=True)
    """Maximum number of prompt tokens that a rank computes together; null: 2048 on a CPU, 16384 on a GPU, fewer if
    memory is short."""
    cuda_graphs: bool = advanced(True, mutable=True)
    """Capture decoding steps in CUDA graphs on a GPU; false: launch each kernel, which is slower with small models."""
    offload_states: bool = setting(False, mutable=True)
    """Move optimizer states, master weights and gradients to host memory during generation."""
    offload_frozen: bool = setting(False, mutable=True)
    """Keep reward models, reference and teacher in host memory; each is on the device only while it scores."""
    keep_weights: bool | Literal["auto"] = advanced("auto", mutable=True)
    """Keep inference weights, KV cache and CUDA graphs in memory between rollouts and update them in place; auto: on a
    GPU if they fit into the memory plan in every phase."""
    endpoint: EndpointConfig | None = advanced(None)
    max_lag: Natural = 0
    """Largest policy lag, in steps: the prompts of this many further steps are sampled beside those that the present
    step trains on (docs/lag.md). 0: sampling and training take turns on the same prompts."""
    recompute_kv: bool = advanced(False)
    """Compute the keys and values of running completions again after each weight sync; false: keep those of older
    weights. On the actor's ranks they are always computed again."""
    curriculum: CurriculumConfig | None = advanced(None)

    def _check(self) -> None:
        require_sampled(self.sampling, ROLLOUT_SAMPLING_KEYS, section="rollout.sampling")
        if self.backend == "module":
            unread = ("quantization", "routing_replay", "max_lag")
            require_defaults(self, unread, "rollout.backend module has no inference weights", prefix="rollout.")
        if self.vllm is not None and self.backend == "auto":
            object.__setattr__(self, "backend", "vllm")
        if self.backend == "vllm" or self.vllm is not None:
            self._check_vllm()
        require(
            self.max_lag or not self.recompute_kv,
            f"rollout.recompute_kv is for completions that newer weights continue, got rollout.max_lag {self.max_lag}: "
            "give 1 or more, or leave it out",
        )

    def _check_vllm(self) -> None:
        """Check the settings that vLLM does not read, or reads in its own way."""
        require(
            self.vllm is not None,
            "rollout.backend vllm needs servers, got no section rollout.vllm: give --rollout.vllm.python with the "
            "interpreter of vLLM's environment, or --rollout.vllm.urls",
        )
        require(
            self.backend == "vllm",
            f"rollout.vllm is for rollout.backend vllm, got {self.backend}: leave one out",
        )
        own = "rollout.backend vllm: vLLM has its own weights"
        require_defaults(self, ["quantization"], own, prefix="rollout.", others={"keep_weights": False})
        by_url = self.vllm is not None and self.vllm.urls
        rules = {
            "vLLM does not report its experts in completions": ["routing_replay"],
            "vLLM does not use our inference weights, which it splits": ["tensor_parallel"],
            "vLLM has its own limit": ["prefill_tokens"],
            "vLLM does not wait for this memory": ["offload_states"],
            "vLLM servers of rollout.vllm.urls run already": ["kv_cache_gib"] if by_url else [],
            "vLLM reports one log-prob": [f"sampling.{key}" for key in ("top_p", "top_k", "min_p", "response_format")],
        }
        for rule, keys in rules.items():
            require_defaults(self, keys, f"rollout.backend vllm: {rule}", prefix="rollout.")

    def require_prompts(self, prompts: int) -> None:
        """Raise UserError unless the prompts of all epochs are enough for a step."""
        size = self.prompts_per_step
        require(
            prompts >= size,
            f"a step takes {size} prompts, the training data has {prompts}: add rows or set "
            f"rollout.prompts_per_step to {prompts} or less",
        )

    @property
    def overlap_steps(self) -> int:
        """Number of steps by which a sampler on ranks of its own works ahead of training, in the plans of memory and
        time; 0 if they alternate."""
        return min(1, self.max_lag)

    def recorded_prompts(self, prompts: int) -> int:
        """Number of prompts, out of `prompts`, whose completions have their experts recorded: all of them if training
        replays the experts, else those that are compared (`rollout/router_agreement`)."""
        return prompts if self.routing_replay else min(prompts, -(-_COMPARED_COMPLETIONS // self.sampling.n))

    @property
    def samples_otherwise(self) -> bool:
        """True if the sampling policy differs from the trained one: older weights, 8-bit products, vLLM, a grammar."""
        is_constrained = self.sampling.response_format is not None
        return self.max_lag > 0 or self.quantization is not None or self.backend == "vllm" or is_constrained
