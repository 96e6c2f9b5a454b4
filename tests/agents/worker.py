"""Plays episodes of a run with an agent program, as it is: `worker.py URL AGENT`, in the environment of the agents."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import httpx


def mini_swe_agent(base_url: str, model: str, task: str) -> str:
    """mini-SWE-agent: tool calls of bash, here in bubblewrap."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    address = {"api_base": base_url, "api_key": "none", "num_retries": 0}
    asked = LitellmModel(model_name=f"openai/{model}", model_kwargs=address, cost_tracking="ignore_errors")
    templates = {"system_template": "Use bash.", "instance_template": "{{task}}"}
    agent = DefaultAgent(asked, BubblewrapEnvironment(timeout=5), step_limit=3, **templates)
    agent.run(task)
    # It leaves a reply without a call out of its history, where the error has it.
    replies = [message["extra"]["response"] for message in agent.messages if "response" in message.get("extra", {})]
    return "".join(str(reply["choices"][0]["message"]["content"]) for reply in replies)


def smolagents(base_url: str, model: str, task: str) -> str:
    """Hugging Face's smolagents: an agent that calls tools."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    agent = ToolCallingAgent(
        tools=[add], model=OpenAIServerModel(model, api_base=base_url, api_key="none"), max_steps=3, verbosity_level=0
    )
    return str(agent.run(task))


def openai_agents(base_url: str, model: str, task: str) -> str:
    """OpenAI's Agents SDK, in two runs of one conversation."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async def play() -> str:
        set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            asked = OpenAIChatCompletionsModel(model, client)
            agent = Agent("adder", instructions="Add.", model=asked, tools=[add], model_settings=ModelSettings())
            first = await Runner.run(agent, task, max_turns=2)
            again = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
            return str((await Runner.run(agent, again, max_turns=2)).final_output)

    return asyncio.run(play())


AGENTS: dict[str, Callable[[str, str, str], str]] = {
    "mini_swe_agent": mini_swe_agent,
    "smolagents": smolagents,
    "openai_agents": openai_agents,
}


def main(url: str, name: str) -> None:
    """Take episodes until the process is ended; an agent that gives up after its limits has said nothing."""
    while True:
        try:
            taken = httpx.post(f"{url}/episodes", json={}, timeout=60)
        except httpx.ConnectError:  # between two rollouts
            time.sleep(0.1)
            continue
        if taken.status_code == 204:
            time.sleep(0.1)
            continue
        told = taken.json()
        try:
            text = AGENTS[name](told["base_url"], told["model"], told["row"]["prompt"][-1]["content"])
        except Exception as error:  # noqa: BLE001 - of the agent
            print(f"{type(error).__name__}: {error}"[:500], flush=True)
            text = ""
        print(f"played: {text[:80]!r}", flush=True)
        httpx.post(told["reward_url"], json={"reward": len(set(text)) / 10}, timeout=60)


if __name__ == "__main__":
    main(*sys.argv[1:])
