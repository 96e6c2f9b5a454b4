"""Programs as environments: clients of OpenAI's API whose requests are recorded as the tokens that were sampled."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.programs import ALGORITHM, PROMPTS, SAMPLING, STOP, Numbered, client_of, play_numbered, program_parts
from tests.support.ranks import run_ranks
from tests.support.rl import chat_row, episode_parts, whole
from tests.support.tiny import tiny_model, tiny_tokenizer

SHORT: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 12}
REPORTED: dict[str, list[int]] = {}
"""Token ids of all turns of each episode, as the API reported them."""


async def talk(base_url: str, api_key: str, model: str, row: dict[str, Any], *, turns: int) -> float:
    """A conversation of many short turns."""
    messages, mine = list(row["prompt"]), REPORTED.setdefault(base_url, [])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=300) as client:
        for _ in range(turns):
            asked = {"model": "gpt", "messages": messages, "max_tokens": 2}
            answer = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
            mine += answer.choices[0].token_ids
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "x"}]
    return 1.0


def branch(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """One answer, then another conversation, then both continued, streamed; longer prompts have more."""
    own = {"model": model, "max_tokens": 6, "stream": True}
    length = len(row["prompt"][0]["content"])
    with client_of(base_url, api_key) as client:
        for text in (row["prompt"][0]["content"], "other")[:length]:
            messages = [{"role": "user", "content": text}]
            for _ in range(2):
                pieces = client.chat.completions.create(messages=messages, **own)
                said = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return float(length)


def continue_texts(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """Completions of text, and of token ids, that continue each other."""
    with client_of(base_url, api_key) as client:
        text = "ab"
        for _ in range(2):
            more = {"extra_body": {"return_token_ids": True}}
            answer = client.completions.create(model=model, prompt=text, max_tokens=4, **more)
            text += tiny_tokenizer().decode(answer.choices[0].token_ids)
        ids = [7, 8]
        for _ in range(2):
            answer = client.completions.create(model=model, prompt=ids, max_tokens=4, **more)
            ids = [*answer.choices[0].prompt_token_ids, *answer.choices[0].token_ids, 9]


def misbehave(base_url: str, api_key: str, model: str, row: dict[str, Any], *, how: str) -> Any:
    client = client_of(base_url, api_key)
    if how != "silent":
        client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=3)
    if how == "raises":
        raise KeyError("secret")
    if how == "overruns":
        for _ in range(9):
            client.chat.completions.create(model=model, messages=row["prompt"], max_tokens=3)
    if how == "probes":
        root = base_url.partition("/episodes")[0]
        ours = {"Authorization": f"Bearer {api_key}"}
        assert httpx2.get(f"{base_url}/models", headers=ours).json()["data"][0]["id"] == "actor"
        assert httpx2.get(f"{base_url}/models").status_code == 401
        assert httpx2.get(f"{root}/episodes/other/v1/models", headers=ours).status_code == 404
        assert httpx2.get(f"{root}/v1/models", headers=ours).status_code == 404
        return 1.5
    return "good" if how == "wrong" else 2.0


def requires_calls(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> float:
    """Asks for a call each time, which nothing enforces, and sends the reply back."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = list(row["prompt"])
    with client_of(base_url, api_key) as client:
        for _ in range(3):
            answer = client.chat.completions.create(
                model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=3
            )
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
    return 1.0


def test_a_reply_without_the_call_that_a_program_requires_is_its_whole_text(world: World, build_program: Any) -> None:
    """Text that the length cut was left out as the beginning of a call, so that each request began a sequence."""
    sampling = replace(SAMPLING, max_prompt_tokens=400)
    rollout = build_program(requires_calls, sampling=sampling).sampler.sample(PROMPTS, step=1)
    metrics = episode_metrics(rollout, world)
    assert (metrics["environment/turns"], metrics["environment/sequences"]) == (3.0, 1.0)


def learned(rollout: Rollout, row: int) -> list[int]:
    return rollout.input_ids[row][rollout.response_mask[row]].tolist()


@pytest.mark.parametrize(("stops", "repeats"), [(False, False), (True, False), (True, True)])
def test_a_program_learns_from_the_tokens_of_the_environment_with_the_same_replies(
    stops: bool, repeats: bool, world: World, paths: dict[str, str], build_program: Any
) -> None:
    sampled = build_program(play_numbered, **SHORT).sampler.sample(PROMPTS, step=1)
    text = tiny_tokenizer().decode(learned(sampled, 0)[:12], skip_special_tokens=True)
    stop = [text[2:4]] if stops else []
    expected = built_in(world, paths["actor"], options={"stop": stop})
    parts = build_program(play_numbered, options={"stop": stop, "repeats": repeats}, **SHORT)
    found = parts.sampler.sample(PROMPTS, step=1)
    assert found.samples.tolist() == [0, 1, 0, 1, 0, 1]
    for name in ("input_ids", "response_mask", "stopped", "weight_versions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.sampled_logprobs, expected.sampled_logprobs)
    torch.testing.assert_close(found.drawn_logprobs, expected.drawn_logprobs)
    assert torch.equal(found.turn_rewards.sum(dim=1), expected.turn_rewards.sum(dim=1))
    of_class = episode_metrics(expected, world)
    assert of_class.pop("environment/observations_cut") == 0.0
    assert episode_metrics(found, world) == {**of_class, "environment/sequences": 1.0}


def built_in(world: World, path: str, *, sampling: RolloutConfig = SAMPLING, **settings: Any) -> Rollout:
    """Episodes of the class whose game `play_numbered` plays."""
    config = EnvironmentConfig(path=f"{Numbered.__module__}:Numbered", **SHORT, **settings)
    parts = episode_parts(world, path, config, sampling=sampling, algorithm=ALGORITHM, stop_token_ids=STOP)
    return parts.sampler.sample(PROMPTS, step=1)


def test_the_experts_of_its_tokens_are_recorded(world: World, tmp_path: Path) -> None:
    """Over several turns they are those of the prompt and all turns, as for a class; before, they were not recorded."""
    variant("qwen3_moe").save_pretrained(tmp_path)
    sampling = replace(SAMPLING, routing_replay=True)
    expected = built_in(world, str(tmp_path), sampling=sampling)
    played = program_parts(world, str(tmp_path), play_numbered, sampling=sampling, **SHORT)
    found = played.sampler.sample(PROMPTS, step=1)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert found.routes is not None and int(found.routes.lengths.min()) > 0
    assert torch.equal(found.padded_routes, expected.padded_routes)


@pytest.mark.faults
def test_of_a_thousand_turns_none_is_tokenised_again(world: World, tmp_path: Path) -> None:
    tiny_model(max_position_embeddings=8192).save_pretrained(tmp_path)
    sampling = replace(SAMPLING, sampling=replace(SAMPLING.sampling, n=20, max_new_tokens=1000))
    parts = program_parts(
        world, str(tmp_path), talk, sampling=sampling, options={"turns": 25}, max_turns=25, timeout_seconds=600
    )
    REPORTED.clear()
    rollout = parts.sampler.sample(PROMPTS[:2], step=1)
    assert len(rollout) == 40, "one sequence for each episode"
    assert sorted(learned(rollout, row) for row in range(40)) == sorted(REPORTED.values())


def test_another_conversation_is_another_sequence_with_the_reward_of_its_episode(build_program: Any) -> None:
    parts = build_program(branch)
    prompts = [chat_row("q"), chat_row("longer")]
    rollout = parts.scorer.score(prompts, parts.sampler.sample(prompts, step=1))
    assert rollout.groups.tolist() == [0, 0, 1, 1, 1, 1]
    assert rollout.samples.tolist() == [0, 1, 0, 0, 1, 1]
    assert rollout.scores.tolist() == [1, 1, 6, 6, 6, 6]
    metrics = [rollout.metrics[f"environment/{name}"] for name in ("sequences", "turns", "reward")]
    assert metrics == [1.5, 3, 3.5]
    first, other = (tiny_tokenizer().decode(rollout.input_ids[row]) for row in (2, 3))
    assert first.startswith("<|im_start|>user\nlonger") and other.startswith("<|im_start|>user\nother")
    scores = torch.tensor([1.0, 2.0, 3.0, 3.0, 5.0, 5.0])
    rewards = torch.zeros_like(rollout.sampled_logprobs).scatter(1, rollout.lengths[:, None] - 1, scores[:, None])
    rollout = replace(rollout, scores=scores, turn_rewards=rewards)
    scored = parts.scorer.compute_logprobs(rollout, parts.planner.plan(rollout))
    torch.testing.assert_close(scored.old_logprobs, rollout.sampled_logprobs, atol=1e-5, rtol=1e-4)
    advantages = parts.estimate(scored, kl_coef=0.0).advantages.sum(dim=1) / rollout.response_mask.sum(dim=1)
    expected = torch.cat([(pair - pair.mean()) / (pair.std() + 1e-4) for pair in (scores[:2], scores[3:5])])
    torch.testing.assert_close(advantages, expected[[0, 1, 2, 2, 3, 3]])  # an episode counts once


def on_ranks(world: World, path: str, shares: bool = False) -> list[dict[str, Any]]:
    """Rollouts of episodes with several sequences, of two prompts and of one, which leaves a rank without any."""
    parts = program_parts(world, path, branch, sampling=replace(SAMPLING, tensor_parallel=world.size if shares else 1))
    rollouts = [
        whole(parts.sampler.sample([chat_row(text) for text in texts], step=1), world).tensors()
        for texts in (["longer", "q"], ["longer"])
    ]
    names = ("input_ids", "response_mask", "groups", "samples")
    return [{name: tensors[name].tolist() for name in names} for tensors in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True])
def test_episodes_are_the_same_on_two_ranks(shares: bool, tmp_path: Path, world: World, paths: dict[str, str]) -> None:
    alone = on_ranks(world, paths["actor"])
    assert [len(rollout["groups"]) for rollout in alone] == [6, 4]
    assert run_ranks(on_ranks, 2, tmp_path, paths["actor"], shares) == [alone, alone]


def test_texts_and_token_ids_continue_by_their_beginning(build_program: Any) -> None:
    parts = build_program(continue_texts)
    rollout = parts.sampler.sample(PROMPTS[:1], step=1)
    assert rollout.samples.tolist() == [0, 0, 1, 1]
    assert rollout.input_ids[1, :2].tolist() == [7, 8]
    assert float(rollout.turn_rewards.abs().sum()) == 0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "it raised KeyError: 'secret'"),
        ("wrong", "a program must return a finite number or None, it returned 'good'"),
    ],
)
def test_what_fails_ends_the_run_or_has_no_reward(
    how: str, reason: str, build_program: Any, log_lines: list[str]
) -> None:
    stops, zero = (build_program(misbehave, options={"how": how}, on_failure=effect) for effect in ("stop", "zero"))
    with user_error(re.escape(reason)):
        stops.sampler.sample(PROMPTS, step=1)
    rollout = zero.sampler.sample(PROMPTS, step=1)
    assert not rollout.turn_rewards.any() and not rollout.stopped.any()
    assert any(reason in line for line in log_lines)


def test_an_episode_without_an_answer_is_left_out(build_program: Any) -> None:
    silent = build_program(misbehave, options={"how": "silent"}, on_failure="zero")
    with user_error("must leave episodes to learn from, it failed in 6 of 6 episodes: it made no request"):
        silent.sampler.sample(PROMPTS, step=1)


def test_who_goes_beyond_the_limits_is_truncated(build_program: Any) -> None:
    parts = build_program(misbehave, options={"how": "overruns"}, max_turns=4)
    rollout = parts.sampler.sample(PROMPTS[:1], step=1)
    assert len(rollout) == 8 and not rollout.stopped.any(), "four sequences of each, as each asks the same again"
    small = replace(SAMPLING, sampling=replace(SAMPLING.sampling, max_new_tokens=40))
    played = build_program(talk, sampling=small, options={"turns": 50}, max_turns=50)
    rollout = played.sampler.sample(PROMPTS, step=1)
    followed = rollout.lengths - rollout.response_mask.int().argmax(dim=1)
    assert int(followed.max()) <= 40 and not rollout.stopped.any()


def test_only_the_episodes_own_address_answers(build_program: Any) -> None:
    rollout = build_program(misbehave, options={"how": "probes"}).sampler.sample(PROMPTS, step=1)
    assert rollout.turn_rewards.sum(dim=1).tolist() == [1.5] * 6


@pytest.mark.parametrize(
    ("program", "options", "rule"),
    [
        ("SAMPLING", {}, "names a function, .* is a RolloutConfig"),
        ("misbehave", {"when": 1}, r"does not \(missing a required argument: 'how'\)|does not \("),
        ("absent", {}, "cannot be imported"),
    ],
)
def test_what_is_no_program_is_refused(program: str, options: dict[str, Any], rule: str, world: World) -> None:
    config = EnvironmentConfig(program=f"{__name__}:{program}", options=options)
    with user_error(rule):
        build_runner(config, rollout=SAMPLING, tokenizer=tiny_tokenizer(), world=world)
