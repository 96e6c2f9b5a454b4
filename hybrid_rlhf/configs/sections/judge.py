"""Settings of a judge: a language model, behind OpenAI's API or in the run, that scores or compares completions."""

from __future__ import annotations

from typing import Any, Literal

from hybrid_rlhf.configs.credentials import check_url
from hybrid_rlhf.configs.sections.rules import Count, Natural, Positive, Settings, Share, require, require_defaults
from hybrid_rlhf.configs.sections.sampling import SamplingParams

JudgeMode = Literal["score", "rank_group", "pairwise"]
_OWN_FIELDS = ("model", "messages", "response_format", "tools", "n", "stream")
"""Fields of a request that the judge sets, or that must not be in it."""
_UNREAD: dict[JudgeMode, tuple[str, ...]] = {
    "score": ("against_column", "both_orders"),
    "rank_group": ("against_column", "range"),
    "pairwise": ("range",),
}
"""Keys that have no effect in a mode."""
_OF_SERVERS = ("served_name", "api_key_env", "max_concurrent", "timeout_seconds", "retries")
"""Keys that have no effect on a model in the run."""
_READ_IN_RUN = ("temperature", "max_tokens", "chat_template_kwargs")
"""Fields of a request that a model in the run reads."""
_MOST_TOKENS = 1024


class JudgeConfig(Settings):
    """A language model that judges completions by a rubric, behind OpenAI's API or in the run (docs/rewards.md)."""

    retired = {
        "instructions": "give rubric",
        "model": "a reward model is a component of its own, {model: FOLDER}; served_name is the name of a served model",
    }
    url: str | tuple[str, ...] = ()
    """Base URL of an endpoint, such as http://127.0.0.1:8001/v1; several are replicas that share the load. ${NAME} is
    replaced by an environment variable."""
    path: str | None = None
    """In place of url: a model that each rank that samples loads and asks in the run, greedily; a folder, a .gguf file
    or a hub name."""
    served_name: str | None = None
    """Name of the model behind the URL; null: the first that it lists."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key, sent as a bearer token and never logged."""
    mode: JudgeMode = "score"
    """score: a number for each completion; rank_group: all completions of a prompt in one ranking; pairwise: each pair
    of them. Scores are in [0, 1]."""
    rubric: str | None = None
    """Criterion: a text, or a file that ends in .md or .txt; null: correct, helpful and harmless answers, whatever
    their length."""
    rubric_column: str | None = None
    """Column with the criterion of a row, in place of rubric; rows without it have no score."""
    against_column: str | None = None
    """pairwise: column with the answer that completions are compared with; null: the other completions of the
    prompt."""
    range: tuple[int, int] = (1, 10)
    """score: lowest and highest number, which become 0 and 1."""
    both_orders: bool = True
    """Comparisons are made in an order and in its reverse, because models prefer a position; false: in one order, at
    half of the cost."""
    explain: bool = False
    """The judge explains before it decides, which is slower; a model that reasons does so anyway."""
    request: dict[str, Any] = {"temperature": 0, "max_tokens": _MOST_TOKENS}
    """Further fields of a request, such as {reasoning_effort: low}; with path temperature 0, max_tokens and
    chat_template_kwargs."""
    max_concurrent: Count = 16
    """Requests of a rank at a time to a URL."""
    timeout_seconds: Positive = 120.0
    """Time limit of an attempt of a request, in seconds."""
    retries: Natural = 3
    """Attempts after the first, with exponential back-off."""
    max_failure_fraction: Share = 0.1
    """Largest fraction of the completions of a step that may have no verdict; if there are more, the run ends. After as
    many failed requests of a rank, it sends no more."""

    def _check(self) -> None:
        for url in self.urls:
            check_url(url, key="url", remedy="name a variable in api_key_env, or write ${NAME} for one in its place")
        require(
            self.rubric is None or self.rubric_column is None,
            f"a judge has one of rubric and rubric_column, got {self.rubric_column} beside a rubric: leave one out",
        )
        require_defaults(self, _UNREAD[self.mode], f"mode {self.mode} of a judge reads other keys")
        require(self.range[0] < self.range[1], f"range must rise, got {list(self.range)}: give for example [1, 10]")
        given = [name for name in _OWN_FIELDS if name in self.request]
        require(not given, f"request may not have {', '.join(_OWN_FIELDS)}, got {' and '.join(given)}: leave it out")
        if self.path is not None:
            self._check_in_run(self.path)

    def _check_in_run(self, path: str) -> None:
        require(not self.url, f"a judge has one of url and path, got {path} and a URL: leave one out")
        require_defaults(self, _OF_SERVERS, "a judge with path has no server")
        unread = [name for name in self.request if name not in _READ_IN_RUN]
        require(
            not unread,
            f"request of a judge with path may have {', '.join(_READ_IN_RUN)}, got {' and '.join(unread)}: leave it "
            "out",
        )
        temperature = self.request.get("temperature", 0)
        require(temperature == 0, f"a judge with path is asked greedily, got request.temperature {temperature}: give 0")
        tokens = self.request.get("max_tokens", _MOST_TOKENS)
        require(
            type(tokens) is int and tokens > 0,
            f"request.max_tokens of a judge must be 1 or more, got {tokens}: give for example {_MOST_TOKENS}",
        )

    @property
    def in_run(self) -> SamplingParams:
        """How a model in the run answers."""
        tokens = self.request.get("max_tokens", _MOST_TOKENS)
        return SamplingParams(max_new_tokens=tokens, temperature=0.0, seed=0)

    @property
    def columns(self) -> list[str]:
        """Columns of the data that it reads."""
        return [column for column in (self.rubric_column, self.against_column) if column]

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def compares_group(self) -> bool:
        """True if the completions of a prompt are compared with each other."""
        return self.mode != "score" and self.against_column is None
