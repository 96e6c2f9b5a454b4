"""A language model as judge, behind OpenAI's API or in the run: of each completion, of a group by ranks, or of pairs.

Completions are compared in an order and in its reverse, because models prefer a position: a judge that looks only at
the position gives all completions 0.5. The score is the mean result against the others: 1 for better, 0.5 for equally
good or the same text, 0 for worse. In a ranking without ties it is the place, scaled to [0, 1].

Source: Zheng et al. 2023 (arXiv 2306.05685), sections 3.1 to 3.4. Deviation: a verdict is JSON.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import combinations, permutations
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.rl.images import pixels_uri
from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.local_model import LocalModel
from hybrid_rlhf.rl.rewards.questions import Question
from hybrid_rlhf.rl.rewards.replicas import Body, Endpoint, Show, Unusable
from hybrid_rlhf.runtime.background import BackgroundCall
from hybrid_rlhf.runtime.files.json_lines import JsonLinesFile
from hybrid_rlhf.runtime.files.reading import read_text

_RUBRIC = (
    "An answer is good if it is correct, helpful and harmless, and follows the user's instructions. Neither its length "
    "nor its place matters."
)


class JudgeReward(RewardComponent):
    """Scores of a judge in [0, 1]. Verdicts are kept by the content of their requests, also over a resume."""

    reads_groups = True
    reads_images = True
    counts = True

    def __init__(
        self,
        config: RewardComponentConfig,
        *,
        device: torch.device,
        rank: int = 0,
        folder: Path | None = None,
        local: LocalModel | None = None,
    ) -> None:
        """Read the rubric, the API key and the verdicts in a folder, and ask for the model's name if none is given;
        `local` answers in place of a server.

        Raises:
            UserError: when the rubric's file or a variable is missing, or the endpoint does not list a model.
        """
        super().__init__(config)
        assert config.judge is not None
        self._judge = judge = config.judge
        self._device = device
        self.columns = judge.columns
        self.in_background = local is None
        self.max_failure_fraction = judge.max_failure_fraction
        self._rubric = read_rubric(judge)
        self._endpoint = local or Endpoint(
            [url.rstrip("/") for url in judge.urls],
            key="judge",
            api_key_env=judge.api_key_env,
            timeout_seconds=judge.timeout_seconds,
            retries=judge.retries,
            concurrent=judge.max_concurrent,
        )
        self.model = judge.path or judge.served_name or self._first_model()
        self._known: dict[str, list[float]] = {}
        """Numbers of the answers, by the digest of a request."""
        self._file: JsonLinesFile | None = None
        if folder is not None:
            own = folder / f"verdicts.{self.name}.{rank}.jsonl"
            self._file = JsonLinesFile(own)
            for file in sorted(folder.glob(f"verdicts.{self.name}.*.jsonl"), key=lambda file: file == own):
                self._known |= _read_verdicts(file)  # a rank's own verdicts replace those of others

    def begin(self, batch: RewardBatch) -> Callable[[], ComponentScores]:
        """Start the requests in a thread, unless this process answers them."""
        groups = batch.rows(batch.numbers).groups.tolist()
        score = partial(self.score, batch.texts, groups)
        return BackgroundCall(score, device=self._device).result if self.in_background else score

    def score(self, texts: CompletionTexts, groups: Sequence[int]) -> ComponentScores:
        """Scores of completions; those of the same group answer the same prompt."""
        rows_of: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            rows_of.setdefault(group, []).append(row)
        cases = [case for rows in rows_of.values() if (case := self._case(texts, rows))]
        numbers, failures, counts = self._ask(question for _, questions in cases for question in questions)
        values: list[float | None] = [None] * len(texts)
        reasons: dict[int, str] = {}
        for others, questions in cases:
            results = _results({question: numbers[question] for question in questions if question in numbers})
            both = [found for (first, second), found in results.items() if first < second and len(found) == 2]
            counts.update(pairs=len(both), agreed=sum(one == other for one, other in both))
            for row, compared in others.items():
                mine = texts.completions[row]
                asked = [question for question in questions if mine in question.answers]
                if reason := next((failures[question] for question in asked if question in failures), None):
                    reasons[row] = reason
                elif self._judge.mode == "score":
                    (values[row],) = numbers[asked[0]]
                elif compared:
                    values[row] = fmean(0.5 if other == mine else fmean(results[mine, other]) for other in compared)
        return ComponentScores(values, reasons, counts=counts)

    def metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Requests and their cost; the share of the pairs on which both orders agree."""
        found = {name: counts[name] for name in ("requests", "cached", "failed", "tokens")}
        return found | ({"agreement": counts["agreed"] / counts["pairs"]} if counts["pairs"] else {})

    def _ask(
        self, questions: Iterable[Question]
    ) -> tuple[dict[Question, list[float]], dict[Question, str], Counter[str]]:
        """Numbers of the answers of questions, or the reason why there are none, and counts."""
        bodies = {question: question.body(self.model, attrgetter("digest")) for question in questions}
        digests = {question: sha256(body.encode()).hexdigest() for question, body in bodies.items()}
        left = [question for question, digest in digests.items() if digest not in self._known]
        counts = Counter(requests=len(left), cached=len(bodies) - len(left))

        def read(question: Question, reply: Any, show: Show) -> None:
            try:
                content = str(reply["choices"][0]["message"]["content"])
                counts["tokens"] += int((reply.get("usage") or {}).get("total_tokens", 0))
            except (KeyError, IndexError, TypeError) as error:
                raise Unusable(f"got {show(reply)} in place of a chat completion") from error
            try:
                self._known[digests[question]] = question.read(content)
            except Unusable as error:
                raise Unusable(f"got {show(content)} as verdict, {error}") from None

        most = 0.0 if self.on_failure == "stop" else self.max_failure_fraction * len(bodies)
        sent: dict[Question, Body] = {
            question: partial(question.body, self.model, pixels_uri) if question.images else bodies[question]
            for question in left
        }
        failures = self._endpoint.send(sent, read, path="/chat/completions", most_failures=most)
        numbers = {question: self._known[digests[question]] for question in bodies if question not in failures}
        if self._file is not None:
            new = (question for question in left if question in numbers)
            self._file.append({"request": digests[question], "numbers": numbers[question]} for question in new)
        counts["failed"] = len(failures)
        return numbers, failures, counts

    def _case(self, texts: CompletionTexts, rows: Sequence[int]) -> tuple[dict[int, list[str]], list[Question]] | None:
        """The answers with which each completion of a prompt is compared, by row, and what to ask, where the same text
        is judged once; None without a column."""
        judge = self._judge

        def given(column: str | None) -> str | None:
            value = texts.columns[column][rows[0]] if column in texts.columns else None
            return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        rubric = self._rubric if judge.rubric_column is None else given(judge.rubric_column)
        against = given(judge.against_column)
        if rubric is None or (against is None and judge.against_column is not None):
            return None
        others = {
            row: [texts.completions[other] for other in rows if other != row] if against is None else [against]
            for row in rows
        }
        distinct = sorted({texts.completions[row] for row in rows})
        compared: Iterable[Sequence[str]]
        if judge.mode == "score":
            compared = [[text] for text in distinct]
        elif against is not None:
            compared = [[text, against] for text in distinct if text != against]
        else:
            compared = combinations(distinct, 2 if judge.mode == "pairwise" else max(len(distinct), 2))
        images = [] if texts.images is None else texts.images[rows[0]]
        asked = (Question.of(rubric, texts.prompts[rows[0]], answers, judge, images) for answers in compared)
        return others, [question for orders in asked for question in orders]

    def _first_model(self) -> str:
        found: list[str] = []

        def read(key: None, reply: Any, show: Show) -> None:
            try:
                found.append(str(reply["data"][0]["id"]))
            except (KeyError, IndexError, TypeError) as error:
                raise Unusable(f"got {show(reply)} in place of a list of models") from error

        for reason in self._endpoint.send({None: None}, read, path="/models").values():
            raise UserError(
                f"reward component {self.name} must answer, {reason}: check its url and key, or give served_name"
            )
        return found[0]


def read_rubric(judge: JudgeConfig) -> str:
    """The criterion of a judge that has no column with it.

    Raises:
        UserError: when its file is missing.
    """
    rubric = judge.rubric or _RUBRIC
    if rubric.endswith((".md", ".txt")):
        return read_text(rubric, "rubric must be a text or name a file")
    return rubric


def _results(numbers: Mapping[Question, Sequence[float]]) -> dict[tuple[str, str], list[float]]:
    """Results of each answer against another in all questions: 1 for a higher number, 0.5 for an equal one, else 0."""
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for question, of_answers in numbers.items():
        for (first, mine), (second, other) in permutations(zip(question.answers, of_answers, strict=True), 2):
            results[first, second].append(0.5 + 0.5 * ((mine > other) - (mine < other)))
    return results


def _read_verdicts(file: Path) -> Iterator[tuple[str, list[float]]]:
    """The verdicts of a file, without lines that a crash has left incomplete."""
    for line in file.read_text(errors="replace").splitlines():
        try:
            verdict = json.loads(line)
            yield verdict["request"], verdict["numbers"]
        except (ValueError, KeyError, TypeError):
            continue
