"""Settings of one component of the RL reward: a model, a Python function, an HTTP endpoint, a verifier or a judge, with
its weight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from hybrid_rlhf.configs.credentials import check_url, host_of
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.rules import Count, Natural, Positive, Settings, require, require_defaults, section
from hybrid_rlhf.configs.sections.sandbox import SandboxConfig

OnFailure = Literal["stop", "drop", "zero"]
Protocol = Literal["scores", "openrlhf"]
VerifierName = Literal["math", "code"]
VERIFIERS: tuple[VerifierName, ...] = get_args(VerifierName)
LEAST_OUTPUT_BYTES = 1024
"""Least `sandbox.output_bytes` with which a verifier's own lines arrive whole."""


class RewardComponentConfig(Settings):
    """One component of the reward; exactly one of model, function, urls, verifier and judge is given."""

    name: str | None = None
    """Name in the metrics (reward/NAME/mean); null: the model's folder, the function's name, the endpoint's host, the
    verifier, or judge."""
    weight: float = 1.0
    """Factor of its scores in the sum over components; 0: only logged."""
    model: str | None = None
    """Reward model: a folder or hub name. One with another tokenizer or chat template encodes the text again."""
    head_weights: dict[str, float] = {}
    """Weights by name of the scores of a model with several heads; heads that are not named have weight 0. Empty: all
    have weight 1."""
    normalize: bool = False
    """A model's scores are normalized with the mean and standard deviation that objective.calibrate measured."""
    steps: Literal["last", "min", "product", "mean"] = "last"
    """Score of a process reward model. last: the score at the end; min, product, mean: over the probabilities that each
    step is correct (arXiv 2305.20050)."""
    function: str | None = None
    """Python function as module:function or path/to/file.py:function, plain or async."""
    urls: tuple[str, ...] = ()
    """HTTP endpoint; several URLs are replicas that share the load. ${NAME} is replaced by an environment variable."""
    protocol: Protocol = "scores"
    """What is sent to the URLs. scores: {prompts, completions, columns}, answered with {scores}; openrlhf: that of
    OpenRLHF's remote reward models (docs/rewards.md)."""
    verifier: VerifierName | None = None
    """Built-in check (docs/agents.md). math: the answer equals that of a column; code: the program passes the tests of
    a column. Both run in the sandbox."""
    column: str | None = None
    """Column of the data that a verifier reads; null: answer for math, tests for code."""
    partial: bool = False
    """verifier code: the score is the fraction of tests that pass; false: 1 if all pass, else 0."""
    workers: Count | None = None
    """Programs of a verifier that run at once on a rank; null: the processors of the host divided by its ranks."""
    sandbox: SandboxConfig = section()
    """Where and within which limits a verifier runs programs."""
    judge: JudgeConfig | None = None
    """Language model, behind OpenAI's API or in the run, that scores or compares completions."""
    timeout_seconds: Positive = 60.0
    """Time limit of a function call or of an attempt of a request, in seconds."""
    retries: Natural | None = None
    """Attempts after the first, with exponential back-off; null: 3 for a request, on another replica if there is one,
    and 1 for a function."""
    batch_size: Count = 64
    """Completions per request."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key, sent as a bearer token and never logged."""
    on_failure: OnFailure = "stop"
    """Action if a completion has no usable score. stop: the run ends; drop: the completion is removed from training and
    metrics; zero: its score is 0. Dropped and zeroed completions are counted in the metrics."""

    def _check(self) -> None:
        kinds = [kind for kind in ("model", "function", "urls", "verifier", "judge") if getattr(self, kind)]
        require(
            len(kinds) == 1,
            f"an item has one of model, function, urls, verifier and judge, got {' and '.join(kinds) or 'none'}: make "
            "each an item of its own",
        )
        require(
            not re.search(r"\.py:\w+$", self.model or ""),
            f"a model is a folder or a hub name, got the function {self.model!r}: write {{function: {self.model}}}",
        )
        if self.function is not None:
            require(
                all(self.function.rpartition(":")),
                f"a function is module:function or path/to/file.py:function, got {self.function!r}: write it so",
            )
        for url in self.urls:
            check_url(
                url,
                key="urls",
                remedy="name a variable in api_key_env, or write ${NAME} for one in its place",
            )
        require(
            re.fullmatch(r"[\w.:-]+", self.label),
            f"a name has letters, digits and . : - _ only, got {self.label!r}: give the component a name",
        )
        if not self.urls:
            require_defaults(self, ["api_key_env", "protocol"], f"{self.label} has no urls")
        if self.model is None:
            require_defaults(self, ["head_weights", "normalize", "steps"], f"{self.label} is no model")
        require(
            self.steps == "last" or not self.normalize,
            f"steps {self.steps} of {self.label} is of a model's chances, which are not normalized: leave one out",
        )
        if self.verifier is None:
            require_defaults(self, ["column", "workers", "partial", "sandbox"], f"{self.label} is no verifier")
        else:
            rule = f"{self.label} is a verifier, which has no retries and limits programs by sandbox.timeout_seconds"
            require_defaults(self, ["timeout_seconds", "retries"], rule)
            require_output(self.sandbox, self.label)
        if self.judge is not None:
            require(
                self.judge.url or self.judge.path,
                "a judge needs the url or the path of a model, got none: give for example http://HOST:8001/v1",
            )
            require_defaults(self, ["timeout_seconds", "retries"], f"{self.label} has these keys inside judge")
        require(
            not self.partial or self.verifier == "code",
            f"partial goes with verifier code, got {self.verifier}: leave it out",
        )

    @property
    def most_retries(self) -> int:
        """Number of attempts after the first. A failing function usually fails again, an endpoint usually recovers."""
        return self.retries if self.retries is not None else 3 if self.urls else 1

    @property
    def judge_path(self) -> str | None:
        """Model of a judge in the run; None for any other component."""
        return None if self.judge is None else self.judge.path

    @property
    def label(self) -> str:
        """The configured or derived name."""
        if self.name is not None:
            return self.name
        if self.model:
            return Path(self.model).name
        if self.verifier:
            return self.verifier
        if self.judge:
            return "judge"
        if self.function:
            return self.function.rpartition(":")[2]
        return host_of(self.urls[0])


def require_output(sandbox: SandboxConfig, verifier: str) -> None:
    """Check that a sandbox keeps the output that a verifier reads.

    Raises:
        UserError: if it keeps less.
    """
    require(
        sandbox.output_bytes >= LEAST_OUTPUT_BYTES,
        f"a verifier reads results from the output, sandbox.output_bytes of {verifier} is {sandbox.output_bytes}: give "
        f"{LEAST_OUTPUT_BYTES} or more",
    )


def require_distinct_names(components: Sequence[RewardComponentConfig]) -> None:
    """Check that components have different names, by which metrics distinguish them.

    Raises:
        UserError: when two components share a name.
    """
    names = [component.label for component in components]
    for name in names:
        require(
            names.count(name) == 1, f"reward.components: names must differ, {name!r} is used twice: give each a name"
        )
