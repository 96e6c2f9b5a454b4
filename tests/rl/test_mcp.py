"""Tools of MCP servers as an environment; in the environment of `make slow` that has the library mcp."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rlhf.rl.metrics import episode_metrics
from hybrid_rlhf.runtime.world import World
from tests.support.clock import wait_until
from tests.support.errors import user_error
from tests.support.programs import SAMPLING, environment_parts
from tests.support.ranks import free_ports
from tests.support.rl import chat_row
from tests.support.tiny import tiny_tokenizer

pytest.importorskip("mcp", reason="needs the extra mcp")
from hybrid_rlhf.rl.environments.mcp_tools import MCPTools  # noqa: E402

SERVER = """
import os, sys, time
from mcp.server import MCPServer
from mcp_types import CallToolResult

server, total = MCPServer("counter"), 0

@server.tool()
def add(number: int) -> str:
    "Add a number to the sum of this connection, and return the sum."
    global total
    total += number
    return str(total)

@server.tool()
def wait() -> str:
    "Never return in time."
    time.sleep(60)
    return ""

@server.tool()
def pair() -> CallToolResult:
    "Return no text."
    return CallToolResult(content=[], structured_content={"first": 1})

@server.tool()
def end() -> str:
    "End the server."
    os._exit(1)

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
"""
ROW = {"prompt": [{"role": "user", "content": "Add 2 and 3."}], "answer": 5}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture(params=["stdio", "url"])
def servers(request: pytest.FixtureRequest, script: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """A server that each episode starts, and one that runs already."""
    if request.param == "stdio":
        yield {"counter": {"command": sys.executable, "args": [str(script), "stdio"]}}
        return
    (port,) = free_ports(1)
    with subprocess.Popen([sys.executable, str(script), "streamable-http", str(port)]) as process:
        time.sleep(0.1)
        wait_until(lambda: bool(psutil.Process(process.pid).net_connections()))
        yield {"counter": {"url": f"http://127.0.0.1:{port}/mcp"}}
        process.kill()


def play(servers: dict[str, Any], *turns: str) -> list[Any]:
    """What the environment returns for the turns of an episode; each in a task of its own, as in a run."""

    async def episode() -> list[Any]:
        tools = MCPTools(servers=servers, timeout_seconds=1.0)
        try:
            assert await asyncio.create_task(tools.reset(ROW)) == ROW["prompt"]
            assert [tool["function"]["name"] for tool in tools.tools] == ["add", "wait", "pair", "end"]
            parameters = tools.tools[0]["function"]["parameters"]
            assert parameters["properties"]["number"]["type"] == "integer" and parameters["required"] == ["number"]
            return [await asyncio.create_task(tools.step(turn)) for turn in turns]
        finally:
            await asyncio.create_task(tools.close())

    return asyncio.run(episode())


def test_tools_are_called_and_the_answer_is_rewarded(servers: dict[str, Any]) -> None:
    turns = [call("add", number=2) + call("add", number=3), call("add", number="x"), call("pair")]
    both, wrong, structured, answer = play(servers, *turns, "so <answer>5</answer>")
    assert both[0] == "2\n5" and both[1:] == (0.0, False)
    assert "number" in wrong[0] and not wrong[2], "the observation is the error of the arguments"
    assert structured == ('{"first": 1}', 0.0, False)
    assert answer == (None, 1.0, True)
    assert play(servers, "6") == [(None, 0.0, True)] and play(servers, "5") == [(None, 1.0, True)]


def test_calls_have_a_time_limit(servers: dict[str, Any]) -> None:
    begin = time.monotonic()
    slow, fast = play(servers, call("wait"), call("add", number=1))
    assert slow[0].startswith("[wait fails: ") and "ime" in slow[0] and fast.done is False
    assert time.monotonic() - begin < 50, "the tool takes 60 seconds"


def test_a_server_that_ends_is_no_observation(script: Path) -> None:
    with pytest.raises(Exception, match="[Cc]losed"):
        play({"counter": {"command": sys.executable, "args": [str(script), "stdio"]}}, call("end"))


def test_a_run_leaves_no_server(world: World, paths: dict[str, str], script: Path) -> None:
    """Episodes have servers of their own at the same time, and their tools in the prompt."""
    server = {"command": sys.executable, "args": [str(script), "stdio"]}
    settings = {"sampling": replace(SAMPLING, max_prompt_tokens=1500), "max_turns": 2}
    parts = environment_parts(world, paths["actor"], MCPTools, options={"servers": {"counter": server}}, **settings)
    rollout = parts.sampler.sample([chat_row("a", answer=1), chat_row("b", answer=2)], step=1)
    assert episode_metrics(rollout, world)["environment/turns"] >= 1
    assert "Add a number to the sum" in tiny_tokenizer().decode(rollout.input_ids[0])
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])])
    options = {"servers": {"counter": {"command": sys.executable, "args": ["-c", "pass"]}}}
    parts = environment_parts(world, paths["actor"], MCPTools, options=options, **settings)
    with user_error("MCPTools failed in 2 of 2 episodes: it raised .*[Cc]losed"):
        parts.sampler.sample([chat_row("a", answer=1)], step=1)


@pytest.mark.parametrize("fault", ["os._exit(1)", "time.sleep(600)"])
def test_a_repeated_reset_connects_anew(fault: str, script: Path, tmp_path: Path) -> None:
    """The prompt had the tools of the attempt before too, and its servers ran on."""
    second, begun = tmp_path / "second.py", tmp_path / "begun"
    first_time = f"if not os.path.exists({str(begun)!r}):\n    open({str(begun)!r}, 'w')\n    {fault}\n"
    tool = "@server.tool()\ndef "
    second.write_text(f"import os, time\n{first_time}{SERVER}".replace(tool, f"{tool}other_"))
    servers = {file.stem: {"command": sys.executable, "args": [str(file), "stdio"]} for file in (script, second)}

    async def episode() -> list[str]:
        tools = MCPTools(servers=servers)
        attempt = asyncio.create_task(tools.reset(ROW))
        while not (attempt.done() or begun.exists()):
            await asyncio.sleep(0.05)
        if "sleep" in fault:
            attempt.cancel()  # its time is over
        await asyncio.wait([attempt])
        assert attempt.cancelled() or attempt.exception() is not None
        await asyncio.create_task(tools.reset(ROW))
        names = [tool["function"]["name"] for tool in tools.tools]
        await asyncio.create_task(tools.close())
        return names

    assert len(asyncio.run(episode())) == 8
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])])


def test_a_server_has_a_command_or_an_address() -> None:
    for server in ({}, {"url": "http://x", "command": "y"}, {"command": "x", "arguments": []}):
        with user_error("an MCP server has url, or command, args and env, x has"):
            MCPTools(servers={"x": server})
