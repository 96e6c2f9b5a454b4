"""The reward component of a verifier."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.loop.sandboxes import build_sandbox
from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.verifiers.code import CodeVerifier
from hybrid_rlhf.rl.rewards.verifiers.mathematics import MathVerifier
from hybrid_rlhf.rl.rewards.verifiers.verdicts import OUTCOMES, Verdict, Verifier
from hybrid_rlhf.runtime.background import BackgroundCall

_COLUMNS = {"math": "answer", "code": "tests"}


class VerifierReward(RewardComponent):
    """Verifies this rank's completions with a pool of workers. Each program has a time limit, so a call always ends."""

    counts = True

    def __init__(self, config: RewardComponentConfig, *, device: torch.device, ranks: int = 1) -> None:
        """Build the sandbox and the verifier.

        Args:
            config: settings of the component.
            device: device of this rank.
            ranks: ranks of this host, which share its processors.

        Raises:
            UserError: if the sandbox or a library is missing.
        """
        super().__init__(config)
        assert config.verifier is not None
        self._device = device
        self.columns = (config.column or _COLUMNS[config.verifier],)
        self._workers = config.workers or max(1, (os.cpu_count() or 1) // ranks)
        sandbox = build_sandbox(config.sandbox)
        self._verifier: Verifier
        if config.verifier == "code":
            self._verifier = CodeVerifier(sandbox, partial_score=config.partial)
        else:
            self._verifier = MathVerifier(
                sandbox,
                timeout_seconds=config.sandbox.timeout_seconds,
                workers=self._workers,
                is_local=config.sandbox.kind == "local" and not config.sandbox.command,
            )

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start to verify in a thread."""
        return BackgroundCall(lambda: self.score(batch.texts), device=self._device).result

    def score(self, texts: CompletionTexts) -> ComponentScores:
        """Scores of completions; a row without the column has none."""
        column = texts.columns.get(self.columns[0], [None] * len(texts))
        places = [place for place, value in enumerate(column) if value is not None]
        judgements = self._verifier(
            [texts.completions[place] for place in places], [column[place] for place in places], self._each
        )
        values: list[float | None] = [None] * len(texts)
        failures: dict[int, str] = {}
        verdicts: dict[int, Verdict] = {}
        for place, judgement in zip(places, judgements, strict=True):
            if isinstance(judgement, Verdict):
                values[place] = judgement.score
                verdicts[place] = judgement
            else:
                failures[place] = str(judgement)
        counts: Counter[str] = Counter(verdict.outcome for verdict in verdicts.values())
        return ComponentScores(values, failures, verdicts, {"judged": len(verdicts), **counts})

    def metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Fractions of the completions that it judges, by the reason why their score is below 1."""
        judged = counts.get("judged")
        return {outcome: counts.get(outcome, 0) / judged for outcome in OUTCOMES} if judged else {}

    def _each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(function, items))
