"""Generation through a Hugging Face module, for models without inference weights.

Modules differ in what they support: padded rows, a cache, and selecting rows of a cache. `probe_module` tests each on
short prompts, against the module's forward over whole sequences, so no family needs an entry here and an option that
changes the logits is not used. Prompts are left-padded if the module supports padding, else prompts of equal length
decode together. Without a usable cache, every step computes the whole sequence again.

Shapes: P prompts, B live rows, T tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybrid_rlhf.functional.logprobs import agreement
from hybrid_rlhf.generation.architecture.hugging_face import trained_positions
from hybrid_rlhf.generation.batching.arrivals import Arrivals
from hybrid_rlhf.generation.batching.continuous import BatchLoad
from hybrid_rlhf.generation.batching.grammar import TokenMasks
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.generation.batching.requests import DecodeWork, NewTokens, Request
from hybrid_rlhf.generation.batching.sampler import DecodeBatch, Sampler, sampling_mode
from hybrid_rlhf.generation.sampling import PromptLogprobs
from hybrid_rlhf.generation.weights.probe import LOW_PRECISION_TOLERANCE
from hybrid_rlhf.models.families.vision import banned_ids
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.policy import wide_logits
from hybrid_rlhf.models.pretrained.loading import position_limit
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import solo_world

_DEFAULT_ROWS = 256
"""Default limit of completions decoded together; the memory of the module's cache is not planned."""


@dataclass(frozen=True)
class ModuleSupport:
    """Features that the forward of a model supports. Without them, generation is slower."""

    padding: bool = True
    """Left-padded rows have the same logits as unpadded ones."""
    cache: bool = True
    """A step with the cache has the same logits as a forward over the whole sequence."""
    own_cache: bool = False
    """The module must create the cache itself."""
    cache_rows: bool = True
    """Rows of the cache can be repeated and selected."""


class ModuleBackend:
    """Decodes with a Hugging Face model, using its weights in place."""

    def __init__(
        self, lm: PreTrainedModel, *, max_batch_rows: int | None = None, support: ModuleSupport | None = None
    ) -> None:
        """Take a model.

        Args:
            lm: model with its full weights on one device.
            max_batch_rows: maximum number of completions decoded together; none: 256.
            support: result of an earlier `probe_module` of this model; none: probe now.
        """
        module = ModuleForward(lm, support or probe_module(lm))
        self._module: ModuleForward | None = module
        self._max_rows = max_batch_rows or _DEFAULT_ROWS
        self.max_positions = position_limit(lm)
        self.trained_positions = trained_positions(lm.config.get_text_config())
        self.vocab_size = module.vocab_size
        self.work = DecodeWork()
        self.records_routes = self.continues = self.reads_images = False
        self.banned_ids = module.banned_ids
        self.kv_cache_bytes = 0  # the cache grows with its rows
        self.load = BatchLoad()
        """Numbers of running and waiting requests in `run_open`; pages are 0, as the cache has none."""

    @property
    def module(self) -> ModuleForward:
        """The forward of the model."""
        if self._module is None:
            raise RuntimeError("a backend must be open to generate, this one was closed")
        return self._module

    def run(self, requests: Sequence[Request]) -> Iterator[NewTokens]:
        """Decode all requests, batch after batch; yields the new tokens of each step."""
        module = self.module
        for batch in _batches(requests, max_rows=self._max_rows, same_length=not module.support.padding):
            yield from _ModuleBatch(module, batch).steps()

    def run_open(self, arrivals: Arrivals) -> Iterator[NewTokens]:
        """Decode requests as they arrive. New ones wait until all those before them have finished."""
        module = self.module
        later: list[Request] = []
        while requests := later or arrivals.take(wait=True):
            later = []
            for batch in _batches(requests, max_rows=arrivals.rows, same_length=not module.support.padding):
                for new in _ModuleBatch(module, batch).steps():
                    yield new
                    later += arrivals.take()
                    for request in arrivals.take_cancelled():
                        request.finish_reason = request.finish_reason or "cancelled"
                    if arrivals.closed:
                        return
                    live = sum(not request.ended for request in batch)
                    self.load = BatchLoad(rows=live, waiting=len(requests) - len(batch) + len(later))
            later = [request for request in later if not request.ended]
            self.load = BatchLoad()

    @torch.no_grad()
    def prompt_logprobs(
        self, tokens: Sequence[int], adapter: int = 0, top: int = 0, images: PromptImages | None = None
    ) -> PromptLogprobs:
        """Log-probs of a prompt, with the `top` most likely tokens. There are no adapters and images."""
        ids = torch.tensor([tokens], device=self.module.device)
        return PromptLogprobs.of(self.module.lm(ids, use_cache=False).logits[0, :-1], ids[0, 1:], top)

    def reset(self) -> None:
        """Clear the load after an exception in `run_open`."""
        self.load = BatchLoad()

    def close(self) -> None:
        """Release the module. The backend cannot be used afterwards."""
        self._module = None


class ModuleForward:
    """The forward of a Hugging Face causal LM, called with the features that it supports."""

    def __init__(self, lm: PreTrainedModel, support: ModuleSupport) -> None:
        self.lm = lm
        self.support = support
        self.vocab_size: int = lm.config.get_text_config().vocab_size
        self.device = next(lm.parameters()).device
        self.banned_ids = banned_ids(lm.config)
        accepted = inspect.signature(lm.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"  # Mamba's name for it
        self._takes_cache = self._cache_name in accepted

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[ModuleState, Tensor]:
        """Compute prompts; returns the state and the next-token logits [B, V]."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        cache = DynamicCache(config=self.lm.config) if self.support.cache and not self.support.own_cache else None
        state = ModuleState(ids.to(self.device), mask.to(self.device), cache)
        return state, self._logits(state, new=longest)

    def step(self, state: ModuleState, tokens: Tensor) -> Tensor:
        """Append one token [B] per row; returns the next-token logits [B, V]."""
        state.ids = torch.cat([state.ids, tokens[:, None]], dim=1)
        state.mask = torch.cat([state.mask, state.mask.new_ones(len(tokens), 1)], dim=1)
        return self._logits(state, new=1 if self.support.cache else state.ids.shape[1])

    def _logits(self, state: ModuleState, *, new: int) -> Tensor:
        extra: dict[str, object] = {}
        if self.support.cache:
            extra["use_cache"] = True
            if state.cache is not None:
                extra[self._cache_name] = state.cache
        elif self._takes_cache:
            extra["use_cache"] = False
        if self.support.padding:
            extra["attention_mask"] = state.mask
            if self._takes_positions:
                extra["position_ids"] = (state.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new:]
        if self._takes_logits_to_keep:
            extra["logits_to_keep"] = 1
        with wide_logits(self.lm):
            output = self.lm(input_ids=state.ids[:, -new:], **extra)
        if self.support.cache:
            state.cache = getattr(output, self._cache_name)
        logits: Tensor = output.logits[:, -1]
        return logits


@dataclass
class ModuleState:
    """Rows that decode together."""

    ids: Tensor
    """[B, T] token ids."""
    mask: Tensor
    """[B, T], 1 on real tokens."""
    cache: Any

    def repeat(self, n: int) -> None:
        """Repeat each row n times; copies of a row are adjacent."""
        self.ids, self.mask = self.ids.repeat_interleave(n, dim=0), self.mask.repeat_interleave(n, dim=0)
        if self.cache is not None:
            self.cache.batch_repeat_interleave(n)

    def select(self, rows: Tensor) -> None:
        """Keep only rows [n]."""
        self.ids = self.ids[rows]
        self.mask = self.mask[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)


class _ModuleBatch:
    """A batch of prompts with the same number of samples."""

    def __init__(self, module: ModuleForward, requests: Sequence[Request]) -> None:
        """Args: the model, and requests ordered by prompt, with the same number of samples for each prompt."""
        self._module = module
        self._samples = requests[0].params.n
        self._live = list(requests)
        self._sampler = Sampler(module.vocab_size, sampling_mode(requests), solo_world(module.device))
        self._rows = DecodeBatch.of(requests, vocab_size=module.vocab_size, device=module.device)
        self._masks = None
        if self._rows.allowed is not None:
            self._masks = TokenMasks(len(requests), module.vocab_size, module.device)

    @torch.no_grad()
    def steps(self) -> Iterator[NewTokens]:
        """Decode to the end; yields the new tokens of each step."""
        module = self._module
        n = self._samples
        once = module.support.cache_rows
        state, logits = module.start([request.prompt for request in self._live[:: n if once else 1]])
        if once and n > 1:
            state.repeat(n)
            logits = logits.repeat_interleave(n, dim=0)
        while True:
            self._mask()
            logits = logits.float()
            if module.banned_ids:
                logits[:, list(module.banned_ids)] = -torch.inf
            drawn = self._sampler(logits, self._rows)
            yield self._append(drawn.stacked().tolist())
            live = [slot for slot, request in enumerate(self._live) if not request.ended]
            if not live:
                return
            tokens = drawn.tokens
            if 2 * len(live) <= len(self._live) and module.support.cache_rows:
                selected = torch.tensor(live, device=module.device)
                state.select(selected)
                tokens = tokens[selected]
                self._rows = self._rows.select(selected)
                self._live = [self._live[slot] for slot in live]
            logits = module.step(state, tokens)

    def _mask(self) -> None:
        """Write the bits of the tokens that grammars allow next; a finished row keeps its last ones."""
        if self._masks is not None and self._rows.allowed is not None:
            running = [(place, r) for place, r in enumerate(self._live) if not r.ended]
            grammars = [(place, request.grammar) for place, request in running if request.grammar is not None]
            if grammars:
                self._masks.begin(grammars).write(self._rows.allowed)

    def _append(self, columns: list[list[float]]) -> NewTokens:
        new: NewTokens = []
        for request, (token, *values) in zip(self._live, zip(*columns, strict=True), strict=True):
            if not request.ended:
                request.append(int(token), *values)
                new.append((request, int(token)))
        return new


@torch.no_grad()
def probe_module(lm: PreTrainedModel) -> ModuleSupport:
    """Test which features the forward of a model supports, on its device.

    The reference is the module's forward over a whole unpadded sequence, which defines the model.
    """
    whole = ModuleForward(lm, ModuleSupport(padding=False, cache=False))
    tokens = probe_tokens(whole.vocab_size)
    short, long, suffix = (_ProbeRow.of(whole, row) for row in (tokens[:8], tokens[:13], tokens[-13:]))
    for padding in (True, False):
        for own_cache in (False, True):
            support = ModuleSupport(padding, own_cache=own_cache)
            together = [[short, long]] if padding else [[short], [long]]
            if not (padding and _selects_tokens(lm)) and all(_holds(lm, support, rows) for rows in together):
                return replace(support, cache_rows=_holds(lm, support, [long, suffix], exchanged=True))
    logger.warning(
        "generation of %s has no usable cache: every step computes the whole sequence again", type(lm).__name__
    )
    return ModuleSupport(padding=False, cache=False)


@dataclass(frozen=True)
class _ProbeRow:
    """A prompt, the tokens of two steps after it, and the logits [3, V] before each step and after the last."""

    prompt: Sequence[int]
    steps: Sequence[int]
    logits: Tensor

    @classmethod
    def of(cls, whole: ModuleForward, tokens: Sequence[int]) -> _ProbeRow:
        logits = [whole.start([tokens[:end]])[1][0].float() for end in range(len(tokens) - 2, len(tokens) + 1)]
        return cls(tokens[:-2], tokens[-2:], torch.stack(logits))


def _holds(lm: PreTrainedModel, support: ModuleSupport, rows: Sequence[_ProbeRow], *, exchanged: bool = False) -> bool:
    """True if rows that decode together have their expected logits; `exchanged`: after rows of the cache are repeated
    and selected."""
    module = ModuleForward(lm, support)
    try:
        state, logits = module.start([row.prompt for row in rows])
        if exchanged:
            state.repeat(2)
            state.select(torch.tensor([2, 1], device=module.device))
            logits = logits.flip(0)
            rows = list(reversed(rows))
        steps = torch.tensor([row.steps for row in rows], device=module.device)
        computed = torch.stack([logits, *(module.step(state, tokens) for tokens in steps.unbind(dim=1))], dim=1)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError):
        return False  # what a family raises for arguments that it does not support
    expected = torch.stack([row.logits for row in rows])
    return agreement(
        computed.float().log_softmax(dim=-1),
        expected=expected.log_softmax(dim=-1),
        dtype=lm.dtype,
        low_precision=LOW_PRECISION_TOLERANCE,
        magnitude=float(expected.abs().amax(dim=-1).mean()),
    ).holds


def _selects_tokens(lm: PreTrainedModel) -> bool:
    """True if attention selects the best keys of all (DeepSeek's sparse attention). It may then select padding, but
    only in sequences longer than the probe's."""
    return any(
        isinstance(size, int) for name, size in vars(lm.config.get_text_config()).items() if "index_topk" in name
    )


def _batches(requests: Sequence[Request], *, max_rows: int, same_length: bool) -> Iterator[list[Request]]:
    """Yield the requests that decode together: those with the same number of samples and similar (`same_length`: equal)
    prompt lengths, at most `max_rows` rows."""
    by_prompt = (list(samples) for _, samples in groupby(requests, lambda request: request.prompt_index))
    prompts = sorted(by_prompt, key=lambda samples: (samples[0].params.n, len(samples[0].prompt)))
    alike = groupby(prompts, lambda samples: (samples[0].params.n, len(samples[0].prompt) if same_length else 0))
    for (n, _), same in alike:
        together = list(same)
        size = max(1, max_rows // n)
        for start in range(0, len(together), size):
            yield [request for samples in together[start : start + size] for request in samples]
