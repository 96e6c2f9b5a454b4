"""Hints of unknown keys: TRL's names have an answer, and a name is suggested only if it is similar."""

from __future__ import annotations

import pytest

from hybrid_rlhf.configs.inference import GenerateConfig
from hybrid_rlhf.configs.parsing.building import build_config, read_words
from hybrid_rlhf.configs.parsing.schema import Layer
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("config_type", "content", "error"),
    [
        (SFTConfig, {"learning_rate": 1}, "unknown option --learning_rate: give optimizer.lr"),
        (RLConfig, {"beta": 0.1, "algorithm": "online_dpo"}, "unknown option --beta: give algorithm.beta"),
        (RLConfig, {"beta": 0.1, "algorithm": "grpo"}, "unknown option --beta: give algorithm.kl.coef"),
        (RLConfig, {"algorithm": {"name": "grpo", "beta": 0.1}}, "(online_dpo has), got 0.1: give algorithm.kl.coef"),
        (PipelineConfig, {"model": {"path": "x"}}, "unknown option --model: give base_model"),
        (PipelineConfig, {"learning_rate": 1}, "give sft.optimizer.lr or reward.optimizer.lr"),
        (SFTConfig, {"optimizer.lr": 1}, "unknown option --optimizer.lr: write lr within optimizer"),
        (
            RLConfig,
            {"use_vllm": True},
            "unknown option --use_vllm: the actor's engine generates: leave it out, or give rollout.vllm",
        ),
        (
            RLConfig,
            {"adapters": "runs.yaml"},
            "--adapters: adapters on one base train through `hybrid-rlhf train-server`",
        ),
        (GenerateConfig, {"temperature": 1.0}, "unknown option --temperature: give sampling.temperature"),
        (GenerateConfig, {"num_generations": 4}, "unknown option --num_generations: give sampling.n"),
        (PreferenceStepConfig, {"rpo_alpha": 1.0}, "--rpo_alpha: give algorithm.sft_coef"),
        (PreferenceStepConfig, {"label_smoothing": 0.1, "algorithm": "cdpo"}, "give algorithm.label_smoothing"),
        (SFTConfig, {"lora": {"modules_to_save": []}}, "--lora.modules_to_save: adapters train linear layers only"),
        (RLConfig, {"max_length": 9}, "--max_length: a row is rollout.max_prompt_tokens and"),
        (RLConfig, {"epsilon_high": 0.3}, "--epsilon_high: give algorithm.clip"),
        (RLConfig, {"repetition_penalty": 1.1}, "RL needs the probabilities with which tokens were sampled"),
        (RLConfig, {"train": {"global_batch_size": 8}}, "--train.global_batch_size: give rollout.prompts_per_step"),
        (
            SFTConfig,
            {"num_generations": 4},
            "TRL's num_generations is rollout.sampling.n of another step, leave it out",
        ),
        (PreferenceStepConfig, {"algorithm": "sigmoid"}, "got sigmoid: give dpo"),
        (RLConfig, {"algorithm": "gae"}, "got gae: give ppo"),
        (RLConfig, {"algorithm": "gpro"}, "got gpro: the nearest is grpo"),
        (RLConfig, {"algorithm": "maxrl"}, "got maxrl: give grpo, and algorithm.divide_by_mean true"),
        (PreferenceStepConfig, {"algorithm": "dppo"}, "got dppo: the nearest is dpo"),
        (RLConfig, {"algorithm": "sarsa"}, "got sarsa: give one of them"),
        (SFTConfig, {"model": "m"}, "model must be a mapping of keys, got m: set model.path or another of its keys"),
        (SFTConfig, {"model": {"path:m": None}}, "--model.path:m: write a space after model.path:"),
        (RLConfig, {"reward": {"components": [{"function:a.py:f": None}]}}, "write a space after function:"),
        (SFTConfig, {"model": {"dtype": "bf16"}}, "got bf16: the nearest is bfloat16"),
        (SFTConfig, {"model": {"dtype": "q"}}, "got q: give one of them"),
        (SFTConfig, {"logging": {"sinks": ["wandbb"]}}, "got wandbb: the nearest is wandb"),
    ],
)
def test_unknown_keys(config_type: type, content: dict[str, object], error: str) -> None:
    assert error in refused(build_config, config_type, [Layer(content)])


def test_an_option_of_another_system_on_the_command_line() -> None:
    words = ["--algo.advantage.estimator", "gae"]
    assert "--algo.advantage.estimator: give algorithm.name" in refused(read_words, words, RLConfig)
