"""Settings of a judge: a language model behind OpenAI's API that scores or compares completions."""

from __future__ import annotations

from typing import Any, Literal

from hybrid_rlhf.configs.credentials import check_url
from hybrid_rlhf.configs.sections.rules import Count, Natural, Positive, Settings, Share, require, require_defaults

JudgeMode = Literal["score", "rank_group", "pairwise"]
_OWN_FIELDS = ("model", "messages", "response_format", "tools", "n", "stream")
"""Fields of a request that the judge sets, or that must not be in it."""
_UNREAD: dict[JudgeMode, tuple[str, ...]] = {
    "score": ("against_column", "both_orders"),
    "rank_group": ("against_column", "range"),
    "pairwise": ("range",),
}
"""Keys that have no effect in a mode."""


class JudgeConfig(Settings):
    """A language model behind OpenAI's API that judges completions by a rubric (docs/rewards.md)."""

    retired = {
        "path": "serve it with `hybrid-rlhf serve PATH`, and give its url, such as http://127.0.0.1:8000/v1",
        "instructions": "give rubric",
        "model": "a reward model is a component of its own, {model: FOLDER}; served_name is the name of a served model",
    }
    url: str | tuple[str, ...] = ()
    """Base URL of an endpoint, such as http://127.0.0.1:8001/v1; several are replicas that share the load. ${NAME} is
    replaced by an environment variable."""
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
    request: dict[str, Any] = {"temperature": 0, "max_tokens": 1024}
    """Further fields of a request, such as {reasoning_effort: low}."""
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

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all replicas."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def compares_group(self) -> bool:
        """True if the completions of a prompt are compared with each other."""
        return self.mode != "score" and self.against_column is None
