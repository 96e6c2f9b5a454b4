"""The generation engine: any number of prompts of any lengths, in batches that fit.

Usable by itself (`GenerationEngine.from_pretrained`) and over the actor of a training run (engines/hybrid.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from transformers import PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections import ModelConfig
from hybrid_rlhf.generation.decoder import BatchDecoder
from hybrid_rlhf.generation.sampling import Completion, SamplingParams, per_request
from hybrid_rlhf.models.loading import load_model
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.runtime.world import solo_world

if TYPE_CHECKING:
    from typing import Self


class GenerationEngine:
    """Completions from a causal LM in evaluation mode."""

    def __init__(
        self, lm: PreTrainedModel, *, stop_token_ids: Iterable[int] | None = None, max_batch_rows: int = 256
    ) -> None:
        """Wrap a model; its weights are used as they are and where they are.

        Args:
            lm: a causal LM whose weights are whole.
            stop_token_ids: tokens that end every completion; none: the eos of the model's generation config.
            max_batch_rows: completions decoded together, at most.
        """
        self.lm = lm
        eos = lm.generation_config.eos_token_id if lm.generation_config is not None else lm.config.eos_token_id
        default = [eos] if isinstance(eos, int) else list(eos or [])
        self.stop_token_ids = frozenset(default if stop_token_ids is None else stop_token_ids)
        self.max_batch_rows = max_batch_rows

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a folder, hub name or GGUF file for generation.

        Args:
            path: the model.
            dtype: of the weights and of all computation but the softmax.
            device: where the weights lie.
            group: ranks that share the model by tensor parallelism; only one rank is possible yet.
            trust_remote_code: run Python code that comes with the model.

        Raises:
            UserError: when there is no such model.
        """
        if group is not None and dist.get_world_size(group) > 1:
            raise UserError("generation runs on one rank a model yet, got a group of more: leave group out")
        resolved = resolve_model(path, world=solo_world(torch.device(device)))
        config = ModelConfig(path=path, trust_remote_code=trust_remote_code)
        lm, _ = load_model(resolved, "causal_lm", config=config, dtype=dtype)
        return cls(lm.to(device).eval())  # type: ignore[arg-type]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Complete each prompt.

        Args:
            prompts: token ids, at least one a prompt, any lengths.
            sampling: for all prompts, or one for each.

        Returns:
            completions[i][j]: sample j of prompt i. The result of a prompt depends on its own seed alone.
        """
        empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
        if empty:
            raise UserError(f"a prompt has at least one token, prompt {empty[0]} has none: drop it")
        requests = per_request(sampling, len(prompts))
        results: list[list[Completion]] = [[] for _ in prompts]
        for batch in self._batches(prompts, requests):
            decoder = BatchDecoder(
                self.lm, [prompts[i] for i in batch], [requests[i] for i in batch], self.stop_token_ids
            )
            for _ in decoder.steps():
                pass
            for index, completions in zip(batch, decoder.completions(), strict=True):
                results[index] = completions
        return results

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[int]:
        """Complete one prompt, token by token, the stop token included."""
        request = replace(per_request(sampling, 1)[0], n=1)
        for added in BatchDecoder(self.lm, [prompt], [request], self.stop_token_ids).steps():
            yield from (token for _, token in added)

    def _batches(self, prompts: Sequence[Sequence[int]], requests: Sequence[SamplingParams]) -> Iterator[list[int]]:
        """Indices of prompts that decode together: equal parameters, similar lengths, at most max_batch_rows rows."""
        groups: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(replace(request, seed=None), []).append(index)
        for params, indices in groups.items():
            indices.sort(key=lambda i: len(prompts[i]))
            size = max(1, self.max_batch_rows // params.n)
            for start in range(0, len(indices), size):
                yield indices[start : start + size]
