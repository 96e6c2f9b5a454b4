"""Hints of unknown keys: TRL's names have an answer, and a name is suggested only if it is similar."""

from __future__ import annotations

import pytest

from hybrid_rlhf.configs.parsing.building import build_config
from hybrid_rlhf.configs.parsing.schema import Layer, resolve
from hybrid_rlhf.configs.parsing.trl_names import _KEYS
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rules import nearest
from hybrid_rlhf.configs.sft import SFTConfig
from tests.support.errors import refused


def test_every_answer_for_a_name_of_trl_is_a_key() -> None:
    known = {"algorithm.name"}
    for config_type in (SFTConfig, RewardConfig, PreferenceStepConfig, PipelineConfig):
        known |= resolve(config_type, []).all_keys(off=True).keys()
    for name in ("ppo", "grpo", "online_dpo"):
        known |= resolve(RLConfig, [Layer({"algorithm": name})]).all_keys(off=True).keys()
    assert not {key for keys in _KEYS.values() for key in keys.split(" or ")} - known


@pytest.mark.parametrize(
    ("config_type", "content", "error"),
    [
        (SFTConfig, {"learning_rate": 1}, "unknown option --learning_rate: give optimizer.lr"),
        (RLConfig, {"learning_rate": 1}, "unknown option --learning_rate: give actor.optimizer.lr"),
        (SFTConfig, {"train": {"batch_size": 1}}, "unknown option --train.batch_size: give train.global_batch_size"),
        (SFTConfig, {"gradient_accumulation_steps": 4}, "--gradient_accumulation_steps: give train.global_batch_size"),
        (RLConfig, {"num_generations": 4}, "unknown option --num_generations: give rollout.sampling.n"),
        (RLConfig, {"beta": 0.1, "algorithm": "online_dpo"}, "unknown option --beta: the nearest is algorithm.beta"),
        (RLConfig, {"beta": 0.1, "algorithm": "grpo"}, "unknown option --beta: give algorithm.kl.coef"),
        (RLConfig, {"algorithm": {"name": "grpo", "beta": 0.1}}, "(online_dpo has), got 0.1: give algorithm.kl.coef"),
        (PipelineConfig, {"model": {"path": "x"}}, "unknown option --model: give base_model"),
        (PipelineConfig, {"model_name_or_path": "x"}, "unknown option --model_name_or_path: give base_model"),
        (
            RLConfig,
            {"reward": {"components": [{"verifier": "maths"}]}},
            "verifier must be one of math, code or null, got maths",
        ),
        (RLConfig, {"reward": {"components": [{"model": "m", "weight": "x"}]}}, "weight must be float, got x"),
        (PipelineConfig, {"learning_rate": 1}, "give sft.optimizer.lr or reward.optimizer.lr"),
        (SFTConfig, {"wibble": 1}, "unknown option --wibble: --help lists the keys"),
        (SFTConfig, {"optimizer.lr": 1}, "unknown option --optimizer.lr: write lr within optimizer"),
        (SFTConfig, {"optimizer": {"lrr": 1}}, "unknown option --optimizer.lrr: the nearest is optimizer.lr"),
        (
            RLConfig,
            {"use_vllm": True},
            "unknown option --use_vllm: the engine of the actor generates: leave it out, or give rollout.vllm",
        ),
        (
            RLConfig,
            {"adapters": "runs.yaml"},
            "--adapters: adapters on one base train through `hybrid-rlhf train-server`",
        ),
        (RLConfig, {"algorithm": "gpro"}, "got gpro: the nearest is grpo"),
        (RLConfig, {"algorithm": "sarsa"}, "got sarsa: give one of them"),
    ],
)
def test_unknown_keys(config_type: type, content: dict[str, object], error: str) -> None:
    assert error in refused(build_config, config_type, [Layer(content)])


def test_only_a_similar_name_is_near() -> None:
    assert nearest("learning_rate", ["logging.run_name", "seed"]) is None
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == "grpo"
    assert nearest("x", []) is None
