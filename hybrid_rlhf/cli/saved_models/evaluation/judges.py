"""Judges of two completions of a prompt: a reward model, or a model behind OpenAI's API.

A model is asked twice, with the completions in both orders, because models prefer a position: a completion wins if it
is preferred in one order and at least equal in the other; contrary preferences are a tie.

Source: Zheng et al. 2023 (arXiv 2306.05685), sections 3.1 and 3.4.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hybrid_rlhf.cli.saved_models.loading import find_model, load_scorer
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig, JudgeConfig
from hybrid_rlhf.data.rows.formats import PromptRow
from hybrid_rlhf.models.pretrained.folders import first_line
from hybrid_rlhf.runtime.background import retry_delay_seconds
from hybrid_rlhf.runtime.observability.progress import ProgressLog
from hybrid_rlhf.runtime.urls import expanded_url, shown_url

_TRIES = 4
_CONCURRENT = 8
_VERDICT = re.compile(r"\[\[([ABC])\]\]")
_INSTRUCTIONS = (
    "the one that answers better: correct, helpful and harmless, and following the user's instructions. Neither the "
    "order of the answers nor their length matters"
)
_REQUEST = """\
Two assistants have answered the same conversation. Decide which answer is better: {instructions}. Explain briefly,
then end with [[A]] if answer A is better, [[B]] if answer B is better, or [[C]] if they are equally good.

<conversation>
{conversation}
</conversation>

<answer_A>
{first}
</answer_A>

<answer_B>
{second}
</answer_B>"""


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one prompt."""

    outcome: float
    """1 if the first model wins, 0.5 for a tie, 0 if the second wins."""
    changed_with_order: bool = False
    unreadable: int = 0
    """Number of the judge's answers without a verdict, which count as ties."""


class RewardJudge:
    """Judge by a reward model: the higher score wins; several scores of a model are added."""

    def __init__(self, config: EvaluateConfig) -> None:
        """Take the settings; the model is loaded when the other models are closed.

        Raises:
            UserError: when there is no such model.
        """
        self._place = find_model(config, config.judge.model)

    def verdicts(self, prompts: Sequence[PromptRow], ours: Sequence[str], theirs: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each prompt."""
        scorer = load_scorer(self._place)
        first, second = (
            scorer.score([(row.messages, text, row.tools) for row, text in zip(prompts, texts, strict=True)])
            for texts in (ours, theirs)
        )
        margins = [sum(our_scores) - sum(their_scores) for our_scores, their_scores in zip(first, second, strict=True)]
        return [Verdict(0.5 if margin == 0 else float(margin > 0)) for margin in margins]


class EndpointJudge:
    """Judge by a model behind an API, asked in both orders."""

    def __init__(self, config: JudgeConfig) -> None:
        """Read the API key, and request the model's name if none is given.

        Raises:
            UserError: when the key's variable is not set, or the endpoint does not answer.
        """
        import httpx2

        self._config = config
        url = expanded_url(config.url or "", key="judge.url").rstrip("/")
        self._shown = shown_url(config.url or "")
        headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env, "")
            if not key:
                raise UserError(
                    f"judge.api_key_env must name a variable, {config.api_key_env} is not set: "
                    f"export {config.api_key_env}=..."
                )
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.Client(base_url=f"{url}/", headers=headers, timeout=config.timeout_seconds)
        self._model = config.served_name or self._ask("GET", "models", lambda reply: str(reply["data"][0]["id"]))

    def verdicts(self, prompts: Sequence[PromptRow], ours: Sequence[str], theirs: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each prompt.

        Raises:
            UserError: when requests fail, or no answer has a verdict.
        """
        with ThreadPoolExecutor(_CONCURRENT) as pool:
            progress = ProgressLog(f"judging by {self._model}", total=len(prompts), unit="pairs")
            judged = list(progress.track(pool.map(self._verdict, prompts, ours, theirs)))
        if all(verdict.unreadable == 2 for verdict in judged):
            raise UserError(
                f"a judge must end with [[A]], [[B]] or [[C]], {self._model} at {self._shown} never did: use another"
            )
        return judged

    def _verdict(self, row: PromptRow, ours: str, theirs: str) -> Verdict:
        forward = self._prefers(row, ours, theirs)
        backward = self._prefers(row, theirs, ours)
        scores = [{"A": 1.0, "B": 0.0}.get(forward or "", 0.5), {"A": 0.0, "B": 1.0}.get(backward or "", 0.5)]
        changed = set(scores) == {0.0, 1.0}
        total = sum(scores)
        return Verdict(0.5 if total == 1.0 else float(total > 1.0), changed, (forward is None) + (backward is None))

    def _prefers(self, row: PromptRow, first: str, second: str) -> str | None:
        """The answer A, B or C; None if the answer has no verdict."""
        conversation = "\n\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in row.messages)
        content = _REQUEST.format(
            instructions=self._config.instructions or _INSTRUCTIONS,
            conversation=conversation,
            first=first,
            second=second,
        )
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        read = lambda reply: str(reply["choices"][0]["message"].get("content") or "")  # noqa: E731
        verdicts = _VERDICT.findall(self._ask("POST", "chat/completions", read, body))
        return verdicts[-1] if verdicts else None

    def _ask(self, method: str, path: str, read: Callable[[Any], str], body: dict[str, Any] | None = None) -> str:
        """Send a request, with retries, and return what `read` extracts from the reply."""
        for number in range(1, _TRIES + 1):
            try:
                response = self._client.request(method, path, json=body)
                if response.status_code == 200:
                    return read(response.json())
                reason = f"HTTP {response.status_code}"
                if response.status_code < 500 and response.status_code not in (408, 425, 429):
                    break
            except Exception as error:  # noqa: BLE001 - errors of the network, JSON and its keys have no common base
                reason = f"{type(error).__name__}: {first_line(error)}"
            if number < _TRIES:
                time.sleep(retry_delay_seconds(number))
        raise UserError(f"the judge must answer, {self._shown} does not ({reason}): check judge.url and its key")
