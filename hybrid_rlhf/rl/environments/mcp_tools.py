"""Environment with the tools of MCP servers (https://modelcontextprotocol.io), of which it is a client.

Each episode connects to the servers anew, and starts those with a command. The prompt shows their tools; the actor
calls them in the format of its chat template. A turn without a call ends the episode: its reward is 1 if the text in
`<answer>...</answer>`, or the whole, is the row's column `answer`, and 0 without that column (`reward.components`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.data.chat.calls import ToolCall
from hybrid_rlhf.data.chat.messages import Message, Tools
from hybrid_rlhf.data.chat.reasoning import answer_of
from hybrid_rlhf.rl.environments.environment import StepResult
from hybrid_rlhf.rl.environments.python_tool import is_equal
from hybrid_rlhf.rl.environments.tools import UNREADABLE, requested_calls

try:
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp_types import CONNECTION_CLOSED
except ImportError as error:
    raise UserError(
        f"tools of MCP servers need the library mcp from 2, which cannot be imported ({error}): pip install "
        "'hybrid_rlhf[mcp]'"
    ) from error


class MCPTools:
    """One conversation with tools."""

    def __init__(self, *, servers: Mapping[str, Mapping[str, Any]], timeout_seconds: float = 20.0) -> None:
        """Take servers by name, each with `command`, `args` and `env`, or with `url`, and the time limit of a call."""
        self._servers = {name: _server(name, dict(server)) for name, server in servers.items()}
        self._timeout_seconds = timeout_seconds
        self._connection: asyncio.Task[None] | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Connect to the servers."""
        await self.close()  # what an attempt has begun that failed (environment.retries)
        self._answer = row.get("answer")
        self.tools: Tools = []
        self._clients: dict[str, Client] = {}
        self._connected, self._closing = asyncio.Event(), asyncio.Event()
        # A connection ends in the task that began it.
        self._connection = asyncio.create_task(self._connect())
        waiting = asyncio.create_task(self._connected.wait())
        await asyncio.wait({self._connection, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._connection.done():
            await self._connection
        return list(row["prompt"])

    async def step(self, completion: str) -> StepResult:
        """Call the tools of a turn, or end the episode with the answer."""
        calls = requested_calls(completion, self.tools)
        if calls is None:
            text = answer_of(completion)
            answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text]
            return StepResult(None, float(self._answer is not None and is_equal(answers[-1], str(self._answer))), True)
        told = [await self._call(call) for call in calls]
        return StepResult("\n".join(told) or UNREADABLE, 0.0, False)

    async def close(self) -> None:
        """End the connections, and the servers that have a command."""
        if self._connection is None:
            return
        if not self._connected.is_set():  # a server that does not answer
            self._connection.cancel()
        self._closing.set()
        await asyncio.wait([self._connection])

    async def _connect(self) -> None:
        async with AsyncExitStack() as stack:
            for name, server in self._servers.items():
                target = server if isinstance(server, str) else stdio_client(server)
                client = await stack.enter_async_context(Client(target, read_timeout_seconds=self._timeout_seconds))
                for tool in (await client.list_tools()).tools:
                    if tool.name in self._clients:
                        raise ValueError(f"tools of MCP servers have different names, {name} has another {tool.name}")
                    self._clients[tool.name] = client
                    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    self.tools.append({"type": "function", "function": function})
            self._connected.set()
            await self._closing.wait()

    async def _call(self, call: ToolCall) -> str:
        """What a tool returned, or why it failed."""
        try:
            result = await self._clients[call.name].call_tool(call.name, call.arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise
            return f"[{call.name} fails: {error}]"
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        if not parts and result.structured_content is not None:
            return json.dumps(result.structured_content)
        return "\n".join(parts) or "[no output]"


def _server(name: str, server: dict[str, Any]) -> StdioServerParameters | str:
    """The server of a mapping."""
    if isinstance(server.get("url"), str) and len(server) == 1:
        return str(server["url"])
    if isinstance(server.get("command"), str) and server.keys() <= {"command", "args", "env"}:
        return StdioServerParameters(**server)
    raise UserError(f"an MCP server has url, or command, args and env, {name} has {server}: write one of both")
