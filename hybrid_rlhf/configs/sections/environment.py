"""Settings of an environment, which replies to the actor between its turns and rewards them."""

from __future__ import annotations

from typing import Any, Literal

from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    Positive,
    Settings,
    advanced,
    is_plain,
    require,
    require_defaults,
)

TOOL_CLASSES = {
    "calculator": "calculator:Calculator",
    "python": "python_tool:PythonTool",
    "shell": "shell:Shell",
    "mcp": "mcp_tools:MCPTools",
}
"""Classes of hybrid_rlhf/rl/environments by short name."""


class EnvironmentConfig(Settings):
    """Environment of multi-turn rollouts (docs/environments.md)."""

    tools: Literal["calculator", "python", "shell", "mcp"] | None = None
    """Short name of an included class, in place of path: a calculator, Python in a sandbox, a shell that stays, tools
    of MCP servers (docs/agents.md); options are those of the class."""
    path: str | None = None
    """Class with reset and step, as module:Class or path/to/file.py:Class."""
    program: str | None = None
    """Function that plays an episode with the actor over OpenAI's API, as module:function or path/to/file.py:function;
    instead of a class. Without either, external programs use rollout.endpoint."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or program; external programs receive them with each episode."""
    shows_images: bool = advanced(False)
    """Programs may send images that the prompts do not have; a class has an attribute of this name."""
    max_turns: Count = 8
    """Maximum number of actor turns per episode, or of requests from a program; rollout.sampling.max_new_tokens limits
    the tokens after the prompt."""
    max_turn_tokens: Count | None = None
    """Longest turn of the actor, in tokens; null: the rest of rollout.sampling.max_new_tokens."""
    max_observation_tokens: Count = 256
    """Longest observation, in tokens without those of its images; a longer one has [truncated] in place of its
    middle."""
    timeout_seconds: Positive = 60.0
    """Time limit of a call of reset or step, or of a program, in seconds."""
    threads: Count = advanced(32)
    """Calls of plain functions that run concurrently on a rank; coroutines all do."""
    retries: Natural = advanced(0)
    """Attempts after the first of a call of reset or step that raises, or of a coroutine that exceeds its time, after
    0.5, 1, 2, ... seconds; for environments whose calls may be repeated."""
    on_failure: Literal["stop", "drop", "zero"] = "stop"
    """Action if an environment raises, times out or returns an invalid step. stop: the run ends; drop: the episode is
    left out; zero: the episode ends, and its last turn has reward 0 (an episode without a turn is left out)."""

    def _check(self) -> None:
        if self.tools is not None:
            path = f"hybrid_rlhf.rl.environments.{TOOL_CLASSES[self.tools]}"
            require(
                self.path in (None, path),
                f"environment.tools names the class {path}, got environment.path {self.path} too: leave one out",
            )
            object.__setattr__(self, "path", path)  # the saved config has both
        require(
            self.program is None or not self.path,
            f"an environment is a class or a program, got environment.path {self.path} and environment.program "
            f"{self.program}: leave one out",
        )
        for key, value, kind in (("path", self.path, "Class"), ("program", self.program, "function")):
            require(
                value is None or all(value.rpartition(":")),
                f"environment.{key} must be module:{kind} or path/to/file.py:{kind}, got {value!r}: write it so",
            )
        if self.path is None:
            unread = ("max_observation_tokens", "retries")
            require_defaults(self, unread, "without environment.path this key is not read", prefix="environment.")
        else:
            own = "environment.path: the class has an attribute of this name"
            require_defaults(self, ("shows_images",), own, prefix="environment.")
        require(
            is_plain(self.options) and (self.path is None or all(map(str.isidentifier, self.options))),
            f"environment.options are names with texts, numbers, lists and mappings, got {self.options}: quote the "
            "others",
        )

    @property
    def name(self) -> str:
        """Name of the class or the program; for external programs the name of the endpoint's section."""
        return self.program or self.path or "rollout.endpoint"
