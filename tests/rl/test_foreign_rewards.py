"""Reward functions of verl and OpenRLHF run as they are."""

from __future__ import annotations

import json
from typing import Any

import torch

from hybrid_rlhf import RL
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.loop.user_code import register
from hybrid_rlhf.rl.rewards.components import CompletionTexts
from hybrid_rlhf.rl.rewards.endpoint import EndpointReward
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from tests.support.errors import user_error
from tests.support.servers import json_server

TEXTS = CompletionTexts(
    [[{"role": "user", "content": "1 + 1"}], [{"role": "user", "content": "2 + 2"}]],
    ["2", "5"],
    {"ground_truth": ["2", "4"], "data_source": ["gsm8k", "gsm8k"], "extra_info": [{"index": 1}, None]},
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source == "gsm8k" and extra_info in ({"index": 1}, None)
    return float(solution_str == ground_truth)


async def detailed_score(solution_str: str, ground_truth: str, **more: Any) -> dict[str, Any]:
    return {"score": 0.5 if solution_str == ground_truth else -1.0, "acc": True}


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> torch.Tensor:
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return torch.tensor([float(answer == label) for answer, label in zip(answers, labels, strict=True)])


def detailed_reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    return {"rewards": reward_func(queries, prompts, labels) * 2, "extra_logs": {}}


def scored(function: Any, texts: CompletionTexts = TEXTS) -> list[float | None]:
    component = FunctionReward(RewardComponentConfig(function=register(function)), device=torch.device("cpu"))
    component.require_columns([{name: values[0] for name, values in texts.columns.items()}])
    scores = component.score(texts)
    assert not scores.failures
    return scores.values


def test_functions_of_other_systems_score_as_there() -> None:
    assert scored(compute_score) == [1.0, 0.0]
    assert scored(detailed_score) == [0.5, -1.0]
    labelled = CompletionTexts(TEXTS.prompts, TEXTS.completions, {"label": ["2", "4"]})
    assert scored(reward_func, labelled) == [1.0, 0.0]
    assert scored(detailed_reward_func, labelled) == [2.0, 0.0]


def test_a_remote_reward_model_of_openrlhf() -> None:
    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        given = json.loads(body)
        rewards = reward_func(given["query"], given["prompts"], given["labels"]).tolist()
        return 200, {"rewards": rewards, "scores": [9] * len(rewards)}

    labelled = CompletionTexts(TEXTS.prompts, TEXTS.completions, {"label": ["2", "4"]})
    with json_server(answer) as url:
        config = RewardComponentConfig(urls=(f"{url}/get_reward",), protocol="openrlhf")
        assert EndpointReward(config, device=torch.device("cpu")).score(labelled).values == [1.0, 0.0]


def test_functions_of_a_script_have_weights() -> None:
    config = RL("m", reward=[{"function": reward_func, "weight": 0.2}, compute_score], data="rows.jsonl").config
    first, second = config.reward.components
    assert isinstance(first, RewardComponentConfig) and isinstance(second, RewardComponentConfig)
    assert first.weight == 0.2 and first.label == "reward_func" and second.label == "compute_score"


def test_a_missing_column_of_verl_is_named_with_its_place() -> None:
    rows = CompletionTexts(TEXTS.prompts, TEXTS.completions, {"reward_model": [{"ground_truth": "2"}] * 2})
    with user_error(
        r"compute_score needs the column ground_truth.*columns: \{ground_truth: reward_model.ground_truth\}"
    ):
        scored(compute_score, rows)
