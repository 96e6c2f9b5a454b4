"""An environment of the library verifiers, unmodified, as a program: `pip install 'verifiers>=0.3.1,<0.4'`."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.programs import PROMPTS, client_of, program_parts

vf = pytest.importorskip("verifiers")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("verifiers 0.4 starts its rollouts by a script of uv", allow_module_level=True)
datasets = pytest.importorskip("datasets")


class NumberedEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    """The game of `Numbered`; the reward is the sum of the turns' numbers."""

    @vf.stop  # type: ignore[untyped-decorator]
    async def over(self, state: Any) -> bool:
        return len(state["trajectory"]) >= state["info"]["turns"]

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]


async def summed(state: Any) -> float:
    return float(sum(range(1, len(state["trajectory"]) + 1)))


NOTHING = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": ""}], "answer": ""}])
ENVIRONMENT = NumberedEnv(dataset=NOTHING, rubric=vf.Rubric(funcs=[summed]))
"""Made when the module is imported: verifiers sets signal handlers, which only the main thread may."""


async def play(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """An episode by verifiers' own client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        given = {"prompt": row["prompt"], "answer": "", "info": {"turns": row["turns"]}, "example_id": 0}
        found = await ENVIRONMENT.generate([given], vf.OpenAIChatCompletionsClient(client), model)
    (output,) = found["outputs"]
    assert output["error"] is None, output["error"]
    return float(output["reward"])


def play_by_hand(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """The same by the client of OpenAI alone."""
    messages, turns = list(row["prompt"]), row["turns"]
    with client_of(base_url, api_key) as client:
        for turn in range(1, turns + 1):
            (choice,) = client.chat.completions.create(model=model, messages=messages).choices
            messages.append({"role": "assistant", "content": choice.message.content})
            messages.append({"role": "user", "content": f"turn {turn}"})
    return float(sum(range(1, turns + 1)))


def test_an_environment_of_verifiers_is_a_program(world: World, paths: dict[str, str]) -> None:
    """Each turn continues the tokens of the last, and tokens, masks and rewards are those of a program without it."""
    settings: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12}
    found, expected = (
        program_parts(world, paths["actor"], program, **settings).sampler.sample(PROMPTS, step=1)
        for program in (play, play_by_hand)
    )
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.response_mask.tolist() == expected.response_mask.tolist()
    metrics = episode_metrics(found)
    assert metrics == episode_metrics(expected)
    assert metrics["environment/sequences"] == 1.0
    assert metrics["environment/reward"] == pytest.approx((6 + 1 + 6) / 3)
