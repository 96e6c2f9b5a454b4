"""Models by their published dimensions, and jobs on machines by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig

from hybrid_rlhf.configs.algorithms import PPOConfig
from hybrid_rlhf.configs.rl import ActorConfig, CriticConfig, RewardSumConfig, RLConfig
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.planning.job import RLJob, modelled_lengths, read_job
from hybrid_rlhf.planning.machine import DATA_SHEETS
from hybrid_rlhf.planning.placed_memory import MemoryModel
from hybrid_rlhf.planning.search import Search
from hybrid_rlhf.planning.step_time import StepTimer

_CACHE_GIB = 16.0
"""Of a sampler that runs ahead: 32,768 tokens of a model of 7B."""


@dataclass(frozen=True)
class Dimensions:
    """Of a decoder."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int | None = None
    """None: as many as heads."""
    family: str = "llama"
    vocabulary: int = 32000

    @property
    def config(self) -> PreTrainedConfig:
        """Of transformers."""
        if self.family == "opt":
            return OPTConfig(
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                word_embed_proj_dim=self.hidden,
                ffn_dim=self.mlp,
                num_attention_heads=self.heads,
                vocab_size=50272,
            )
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=4096,
        )


MODELS = {
    "opt-350m": Dimensions(24, 1024, 4096, 16, family="opt"),
    "opt-1.3b": Dimensions(24, 2048, 8192, 32, family="opt"),
    "opt-6.7b": Dimensions(32, 4096, 16384, 32, family="opt"),
    "opt-13b": Dimensions(40, 5120, 20480, 40, family="opt"),
    "opt-30b": Dimensions(48, 7168, 28672, 56, family="opt"),
    "opt-66b": Dimensions(64, 9216, 36864, 72, family="opt"),
    "llama-1b": Dimensions(16, 2048, 8192, 32, 8, vocabulary=128256),
    "llama-7b": Dimensions(32, 4096, 11008, 32),
    "llama-8b": Dimensions(32, 4096, 14336, 32, 8, vocabulary=128256),
    "llama-13b": Dimensions(40, 5120, 13824, 40),
    "llama-33b": Dimensions(60, 6656, 17920, 52),
    "llama-34b": Dimensions(48, 8192, 22016, 64, 8),
    "llama-65b": Dimensions(80, 8192, 22016, 64),
    "llama-70b": Dimensions(80, 8192, 28672, 64, 8),
    "dense-300b": Dimensions(93, 16384, 44032, 128, 16),
}
"""OPT: arXiv 2205.01068, table 1; LLaMA: 2302.13971, table 2; Llama 2 70B and 34B: 2307.09288, 2308.12950; Llama 3:
2407.21783. dense-300b is assumed: ChatLearn does not give its dimensions."""


@dataclass(frozen=True)
class Setting:
    """An RL step of PPO on a machine."""

    machine: str
    ranks: int
    actor: str
    critic: str
    """Critic, and reward model unless another is named."""
    rows: int
    """Completions of a step."""
    prompt_tokens: int
    new_tokens: int
    """Limit of a completion."""
    mean_tokens: float | None = None
    """None: all completions have the limit."""
    mini_batches: int = 1
    link_gib_per_second: float | None = None
    ranks_per_host: int = 8
    micro_batch_tokens: int = 8192
    reward: str | None = None
    policy_lag: int = 0
    """Of plans with a separate sampler."""
    lora_rank: int | None = None
    """Of actor and critic; none: all weights learn."""

    def search(self, folder: Path) -> Search:
        """The planner of the setting; configs of the models are written to a folder."""
        machine = DATA_SHEETS[self.machine]
        if self.link_gib_per_second is not None:
            machine = machine.with_network(self.link_gib_per_second)
        job = self.job(folder)
        rank = replace(machine.rank(self.ranks), ranks_per_host=min(self.ranks, self.ranks_per_host))
        return Search(StepTimer(job, machine, rank.cluster), MemoryModel(job, rank))

    def job(self, folder: Path) -> RLJob:
        """What a step computes."""
        names = (self.actor, self.critic, self.reward or self.critic)
        actor, critic, reward = (shape_folder(name, folder) for name in names)
        correction = CorrectionConfig() if self.policy_lag else None
        config = RLConfig(
            model=ModelConfig(path=actor, gradient_checkpointing=True),
            algorithm=PPOConfig(mini_batches=self.mini_batches, epochs=1, correction=correction),
            actor=ActorConfig(lora=None if self.lora_rank is None else LoraConfig(rank=self.lora_rank)),
            critic=CriticConfig(path=critic),
            reward=RewardSumConfig(components=[reward]),
            rollout=RolloutConfig(
                prompts_per_step=self.rows,
                max_prompt_tokens=self.prompt_tokens,
                sampling=SamplingParams(max_new_tokens=self.new_tokens),
                max_lag=self.policy_lag,
                kv_cache_gib=_CACHE_GIB if self.policy_lag else None,
            ),
        )
        lengths = modelled_lengths(
            prompts=self.rows,
            per_prompt=1,
            prompt_tokens=self.prompt_tokens,
            mean_tokens=self.new_tokens if self.mean_tokens is None else self.mean_tokens,
            max_tokens=self.new_tokens,
        )
        return read_job(config, torch.device("cuda"), lengths=lengths)


@cache
def shape_folder(name: str, folder: Path) -> str:
    """A folder with a config and no weights."""
    path = folder / name
    MODELS[name].config.save_pretrained(path)
    return str(path)
