"""Generation against Hugging Face's generate, and against itself in other batches."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.backend import BackendName
from hybrid_rlhf.generation.batching.requests import _warn_of_untrained_positions
from hybrid_rlhf.generation.sampling import per_request
from hybrid_rlhf.models.policy import Policy
from tests.generation.references import hugging_face_greedy
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.generation import SHORT_GREEDY, SHORT_PROMPTS, SHORT_SAMPLED, SYSTEM_PROMPT, engine_of, token_ids_of
from tests.support.model_types import tiny_of_type
from tests.support.models import HEAD_FAMILIES, build_model
from tests.support.tiny import tiny_model


@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_greedy_tokens_through_the_module_are_those_of_hugging_face(family: str) -> None:
    model = build_model(family)
    stop = [2, 11, 40, 77, 130]  # stops somewhere, at different places
    model.generation_config.eos_token_id = stop[:3]
    engine = GenerationEngine.from_model(model, backend="module")
    sampling = replace(SHORT_GREEDY, stop_token_ids=tuple(stop[3:]))
    for prompt, (completion,) in zip(SHORT_PROMPTS, engine.generate(SHORT_PROMPTS, sampling), strict=True):
        assert completion.token_ids == hugging_face_greedy(model, prompt, 12, stop=stop)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in stop else "length")


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_temperature_0_is_greedy_with_the_models_own_log_probs(backend: BackendName) -> None:
    """Beside requests that are drawn, and whatever else is asked for; the log-probs are those of temperature 1."""
    model = tiny_model()
    engine = engine_of(model, backend=backend)
    cold = SamplingParams(max_new_tokens=12, temperature=0)
    each = [replace(cold, seed=number, top_p=0.9 if number == 1 else 1.0) for number in range(4)] + [SHORT_SAMPLED]
    for prompt, params, (completion, *_) in zip(SHORT_PROMPTS, each, engine.generate(SHORT_PROMPTS, each), strict=True):
        if params is SHORT_SAMPLED:
            continue
        expected = hugging_face_greedy(model, prompt, 12)
        assert completion.token_ids == expected
        with torch.no_grad():
            logits = model(torch.tensor([prompt + expected])).logits[0, len(prompt) - 1 : -1]
        logprobs = token_logprobs(logits, labels=torch.tensor(expected))
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)
        if params.draws_from_all:
            assert completion.sampling_logprobs == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "mamba"])
def test_samples_of_a_recurrent_model_end_apart(family: str) -> None:
    """Through the module; test_continuous.py has the native backend."""
    model = tiny_of_type(family)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = engine_of(model, backend="module")
    lengths = [3, 5, 4, 12, 7]
    each = [replace(SHORT_GREEDY, max_new_tokens=length, n=2) for length in lengths]
    prompts = [[token % 100 for token in prompt] for prompt in SHORT_PROMPTS]
    for prompt, length, samples in zip(prompts, lengths, engine.generate(prompts, each), strict=True):
        assert [sample.token_ids for sample in samples] == [hugging_face_greedy(model, prompt, length)] * 2


def test_a_completion_does_not_depend_on_its_batch() -> None:
    """Of the module; test_continuous.py has the native backend."""
    engine = engine_of(stop=range(3, 30), backend="module")
    together = token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_SAMPLED))
    assert len({len(sample) for samples in together for sample in samples}) > 1, "rows end apart"
    requests = per_request(SHORT_SAMPLED, len(SHORT_PROMPTS))
    for prompt, params, samples in zip(SHORT_PROMPTS, requests, together, strict=True):
        assert token_ids_of(engine.generate([prompt], [params])) == [samples]
    small = engine_of(stop=range(3, 30), backend="module", max_batch_rows=2)
    assert token_ids_of(small.generate(SHORT_PROMPTS, SHORT_SAMPLED)) == together


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them() -> None:
    engine = engine_of()
    first, again = engine.generate(SHORT_PROMPTS, SHORT_SAMPLED), engine.generate(SHORT_PROMPTS, SHORT_SAMPLED)
    assert token_ids_of(first) == token_ids_of(again), "prompts are cached by then, so log-probs may differ in rounding"
    assert first == engine_of().generate(SHORT_PROMPTS, SHORT_SAMPLED)
    assert first != engine.generate(SHORT_PROMPTS, replace(SHORT_SAMPLED, seed=8))
    assert all(a.token_ids != b.token_ids for a, b in first)
    unseeded = replace(SHORT_SAMPLED, seed=None)
    assert engine.generate(SHORT_PROMPTS, unseeded) != engine.generate(SHORT_PROMPTS, unseeded)


@pytest.mark.parametrize("backend", ["auto", "module"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_training_forward(temperature: float, backend: BackendName) -> None:
    model = tiny_model()
    sampling = replace(SHORT_SAMPLED, temperature=temperature, top_p=0.9, top_k=20)
    results = engine_of(model, range(3, 10), backend=backend).generate(SHORT_PROMPTS, sampling)
    for prompt, samples in zip(SHORT_PROMPTS, results, strict=True):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids])
            mask = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                expected, _ = Policy(model)(ids, mask, mask, temperature)
            assert sample.logprobs == pytest.approx(expected[0, len(prompt) :].tolist(), abs=1e-5, rel=1e-4)


def test_the_module_reads_the_prompt_of_n_samples_once_and_rows_that_have_ended_no_further() -> None:
    model = tiny_model()
    engine = engine_of(model, range(3, 60), backend="module")
    shapes = []
    model.register_forward_pre_hook(
        lambda module, inputs, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine.generate([SHORT_PROMPTS[0]], replace(SHORT_SAMPLED, n=8, max_new_tokens=60))
    assert shapes[:2] == [(1, 5), (8, 1)]
    assert len(shapes) < 60, "stops once all have"
    assert shapes[-1] < shapes[1], "rows leave the batch"


@pytest.mark.parametrize("temperature", [-0.5, 1e-40, 9e-6, float("inf"), float("nan")])
def test_temperatures_that_logits_cannot_be_divided_by_are_refused(temperature: float) -> None:
    """1e-40 is 0 in float32: every token was number 0, with a log-prob that is not a number."""
    with user_error(r"temperature must be (0 \(greedy\) or at least 1e-05|a finite number), got"):
        SamplingParams(temperature=temperature)


def test_at_the_least_temperature_the_likeliest_token_is_sampled() -> None:
    engine = engine_of()
    coldest = engine.generate(SHORT_PROMPTS, replace(SHORT_GREEDY, temperature=1e-5, seed=1))
    assert token_ids_of(coldest) == token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_GREEDY))
    assert all(abs(logprob) < 1e-3 for samples in coldest for logprob in samples[0].logprobs)


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_token_ids_that_the_model_does_not_have_are_refused(backend: BackendName) -> None:
    """They were an IndexError, and on a GPU an assertion that ends all use of the device."""
    engine = engine_of(backend=backend)
    for prompt, stop, wrong in (([4, 259], (), 259), ([-1], (), -1), ([4], (1000,), 1000)):
        with user_error(rf"token ids must be in 0\.\.258, (prompt 1|stop_token_ids) has {wrong}: remove it"):
            engine.generate([[5], prompt], replace(SHORT_GREEDY, stop_token_ids=stop))
    assert engine.generate([[0, 258]], SHORT_GREEDY)[0][0].token_ids
    for prompts in (["text"], [4, 5]):
        with user_error("a prompt is a list of token ids, prompt 0 is ('text'|4): encode its text"):
            engine.generate(prompts, SHORT_GREEDY)
    with user_error("prompt 1 has none"):
        engine.generate([[4], []], SHORT_GREEDY)
    for wrong in ({"top_p": 0.0}, {"top_k": -1}, {"n": 0}, {"max_new_tokens": 0}, {"seed": -1}):
        with user_error(next(iter(wrong))):
            SamplingParams(**wrong)


def test_a_list_or_a_single_string_may_stop() -> None:
    """A string was a tuple of its characters, each of which ended a completion."""
    for stop in ("ab", ["ab"]):
        assert SamplingParams(stop=stop).stop == ("ab",)


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_a_warning_says_once_that_sequences_exceed_the_context(backend: BackendName, log_lines: list[str]) -> None:
    _warn_of_untrained_positions.cache_clear()
    model = tiny_model(max_position_embeddings=33)
    within = replace(SHORT_GREEDY, max_new_tokens=28)
    for _ in range(2):
        engine = engine_of(model, backend=backend)
        engine.generate([[5] * 5], within)
        assert not [line for line in log_lines if "context length" in line]
    for _ in range(2):
        engine.generate([[5] * 6], within)
    (line,) = [line for line in log_lines if "context length" in line]
    assert "exceed the model's context length of 33 tokens (max_position_embeddings)" in line


@pytest.mark.parametrize("way", ["packed", "views", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_after_training_the_next_call_samples_with_the_new_weights(family: str, way: str) -> None:
    """Not with new norms beside old products, nor with old keys of a prefix: also when the embedding is frozen."""
    model = variant(family).eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    kind = "int8" if way == "int8" else None

    def built() -> GenerationEngine:
        return engine_of(model, quantization=kind)

    with torch.backends.mkldnn.flags(enabled=way == "packed"):
        engine, optimizer = built(), torch.optim.SGD(model.parameters(), lr=0.3)
        decoder = engine.backend.decoder
        before = engine.generate([SYSTEM_PROMPT], SHORT_GREEDY)
        ids = torch.tensor([SYSTEM_PROMPT])
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after, expected = (
            engine.generate([SYSTEM_PROMPT], SHORT_GREEDY),
            built().generate([SYSTEM_PROMPT], SHORT_GREEDY),
        )
        assert after == expected != before
        assert (engine.backend.decoder is decoder) == (way == "views"), "what is not packed stays at its addresses"
        held = engine.backend.held
        assert engine.generate([SYSTEM_PROMPT], SHORT_GREEDY) and engine.backend.held is held, "and is kept meanwhile"


def test_an_engine_does_not_keep_the_model_that_it_has_packed() -> None:
    model = tiny_model()
    engine, kept = engine_of(model), weakref.ref(model)
    before = engine.generate(SHORT_PROMPTS, SHORT_GREEDY)
    del model
    gc.collect()
    assert kept() is None and token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_GREEDY)) == token_ids_of(before)
