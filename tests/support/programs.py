"""Programs that play episodes with the actor over OpenAI's API, and the parts of a run whose environment they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

from hybrid_rlhf.configs.algorithms import GRPOConfig
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.rl.parts import RLParts
from hybrid_rlhf.runtime.world import World
from tests.support.rl import chat_row, episode_parts
from tests.support.tiny import tiny_tokenizer

STOP = tuple(range(3, 60))
"""A random actor ends its turns now and then."""
SAMPLING = RolloutConfig(
    prompts_per_step=3, max_prompt_tokens=80, sampling=SamplingParams(n=2, max_new_tokens=120, temperature=0.8)
)
ALGORITHM = GRPOConfig(kl=None, loss_normalization="token", mini_batches=1)
PROMPTS = [chat_row("a", turns=3), chat_row("bcd", turns=1), chat_row("ef", turns=3)]


class Numbered:
    """Replies with the number of the turn, for as many turns as the row wants; each turn earns its number."""

    def __init__(self, *, stop: Any = ()) -> None:
        self._turn, self.stop_strings = 0, stop

    def reset(self, row: Mapping[str, Any]) -> None:
        self._turns = row["turns"]

    def step(self, completion: str) -> tuple[str, float, bool]:
        self._turn += 1
        return f"turn {self._turn}", float(self._turn), self._turn == self._turns


def client_of(base_url: str, api_key: str) -> openai.OpenAI:
    """The client of an episode."""
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


def play_numbered(
    base_url: str, api_key: str, model: str, row: dict[str, Any], *, stop: Any = (), repeats: bool = False
) -> float:
    """The same game, played by a client."""
    messages, game, reward = list(row["prompt"]), Numbered(), 0.0
    game.reset(row)
    with client_of(base_url, api_key) as client:
        while True:
            more = {"stop": list(stop)} if stop else {}
            (choice,) = client.chat.completions.create(
                model=model, messages=messages, extra_body={"return_token_ids": True}, **more
            ).choices
            whole = tiny_tokenizer().decode(choice.token_ids, skip_special_tokens=True)
            said = whole if repeats else choice.message.content
            messages.append({"role": "assistant", "content": said})
            observation, earned, done = game.step(said)
            reward += earned
            if done:
                return reward
            messages.append({"role": "tool", "tool_call_id": "1", "content": observation})


def program_parts(
    world: World, path: str, program: Any, *, sampling: RolloutConfig = SAMPLING, options: Any = None, **settings: Any
) -> RLParts:
    """The parts of a run whose episodes a program plays; none: programs outside of it."""
    name = program and f"{program.__module__}:{program.__name__}"
    config = EnvironmentConfig(program=name, options=options or {}, **settings)
    return episode_parts(world, path, config, sampling=sampling, algorithm=ALGORITHM, stop_token_ids=STOP)


def environment_parts(
    world: World, path: str, kind: type, *, sampling: RolloutConfig = SAMPLING, **settings: Any
) -> RLParts:
    """The parts of a run whose episodes have an environment of a class."""
    config = EnvironmentConfig(path=f"{kind.__module__}:{kind.__name__}", **settings)
    return episode_parts(world, path, config, sampling=sampling, algorithm=ALGORITHM, stop_token_ids=STOP)
