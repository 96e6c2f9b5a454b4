"""Tasks of lm-evaluation-harness on a saved model: texts by the generation engine, log-likelihoods by the policy.

The harness's Hugging Face backend is not used because the engine decodes faster, and because engine and policy are what
training samples from and scores with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from hybrid_rlhf.cli.saved_models.evaluation.results import Z95, Estimate, Measurement
from hybrid_rlhf.cli.saved_models.loading import Place, load_lm
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import EvaluateConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.collation import padded
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.folders import first_line


def harness(config: EvaluateConfig, place: Place) -> Measurement:
    """Run tasks; intervals come from the harness's standard errors.

    Raises:
        UserError: when there is no such task, or its data cannot be loaded.
    """
    manager = TaskManager(include_path=config.tasks_folder)
    unknown = [name for name in config.tasks if not manager.match_tasks([name])]
    if unknown:
        raise UserError(f"tasks must be tasks of lm-evaluation-harness, {unknown[0]} is none: see `lm_eval ls tasks`")
    try:
        results = lm_eval.simple_evaluate(
            model=EngineLM(config, place),
            tasks=list(config.tasks),
            task_manager=manager,
            num_fewshot=config.few_shot,
            limit=config.max_rows,
            apply_chat_template=config.apply_chat_template,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
            bootstrap_iters=1000,
        )
    except OSError as error:  # errors of data sets and of the network
        raise UserError(
            f"the data of {', '.join(config.tasks)} cannot be loaded ({first_line(error)}): check it"
        ) from error
    values: dict[str, Estimate | float | int] = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, rule = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not rule:
                continue
            stderr = metrics.get(f"{metric}_stderr,{rule}")
            key = f"{task} {metric}" if rule == "none" else f"{task} {metric} ({rule})"
            spread = Z95 * stderr if isinstance(stderr, float) else None
            values[key] = float(value) if spread is None else Estimate(float(value), value - spread, value + spread)
        rows = results.get("n-samples", {}).get(task, {}).get("effective")
        if rows:
            values[f"{task} rows"] = int(rows)
    return Measurement("lm-evaluation-harness", values)


class EngineLM(TemplateLM):  # type: ignore[misc]
    """A saved model with the interface of lm-evaluation-harness."""

    def __init__(self, config: EvaluateConfig, place: Place) -> None:
        super().__init__()
        self._config = config
        self.tokenizer = place.tokenizer
        self._device = place.device
        lm = load_lm(place)
        self._policy = Policy(lm)
        self._engine = GenerationEngine.from_model(lm, tokenizer=place.tokenizer)
        self._engine.maker.stop_token_ids |= {*stop_token_ids(place.tokenizer, None)}
        self._limit = int(getattr(lm.config.get_text_config(), "max_position_embeddings", 0) or 2048)

    @property
    def eot_token_id(self) -> int:
        """The token that begins a text without context."""
        return int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, part of the key of the harness's cache."""
        return self._config.path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"]  # type: ignore[assignment]
        return ids

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-prob of each continuation, and true if greedy decoding gives the continuation."""
        scores: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda place: -len(requests[place][1]) - len(requests[place][2]))
        for start in range(0, len(order), self._config.batch_rows):
            places = order[start : start + self._config.batch_rows]
            rows = [(requests[place][1] + requests[place][2])[-self._limit :] for place in places]
            counts = [min(len(requests[place][2]), len(row) - 1) for place, row in zip(places, rows, strict=True)]
            scores |= zip(places, self._scores(rows, counts), strict=True)
        return [scores[place] for place in range(len(requests))]

    def _scores(self, rows: Sequence[list[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        """The summed log-prob of the last `count` tokens of each row, and true if all of them are greedy."""
        ids, real = padded(rows, 0, self._device)
        wanted = torch.zeros_like(real)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            wanted[place, len(row) - count : len(row)] = True
        hidden, _ = self._policy.hidden(ids, real, wanted)
        results = []
        for states, tokens in zip(hidden.split(list(counts)), ids[wanted].split(list(counts)), strict=True):
            logits = self._logits(states)
            chosen = logits.log_softmax(dim=-1).gather(1, tokens[:, None])
            results.append((float(chosen.double().sum()), bool((logits.argmax(dim=-1) == tokens).all())))
        return results

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [n, V] float32 of hidden states [n, H]."""
        head = self._policy.head
        scaled, bias = head.scaled(states)
        logits = torch.nn.functional.linear(scaled, head.weight, bias).float()
        softcap = head.convention.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-prob of each whole text, in windows of the model's maximum length."""
        totals = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            windows = []
            for start in range(0, len(ids), self._limit - 1):
                before = ids[start - 1 : start] if start else [self.eot_token_id]
                windows.append((None, before, ids[start : start + self._limit - 1]))
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(windows)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions, without the stop strings."""
        prompts = []
        sampling = []
        for context, options in (request.args for request in requests):
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else until
            tokens = int(options.get("max_gen_toks", self._config.sampling.max_new_tokens))
            temperature = float(options.get("temperature", 0.0) or 0.0) if options.get("do_sample", True) else 0.0
            ids = self.tok_encode(context)[-max(1, self._limit - tokens) :]
            prompts.append(ids or [self.eot_token_id])
            sampling.append(
                SamplingParams(
                    max_new_tokens=tokens,
                    temperature=temperature,
                    top_p=float(options.get("top_p", 1.0)),
                    stop=tuple(stop for stop in until if stop),
                    seed=self._config.seed,
                )
            )
        sampled = self._engine.generate(prompts, sampling)
        texts = [str(self.tokenizer.decode(c.token_ids, skip_special_tokens=True)) for (c,) in sampled]
        return [
            text[: min([text.find(stop) for stop in params.stop if stop in text], default=len(text))]
            for text, params in zip(texts, sampling, strict=True)
        ]
