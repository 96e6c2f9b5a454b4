"""Generation against Hugging Face's generate, and against itself in other batches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.backends.backend import BackendName
from hybrid_rlhf.generation.batching.request_maker import _warn_of_untrained_positions
from hybrid_rlhf.generation.sampling import per_request
from hybrid_rlhf.models.policy import Policy
from tests.support.families import COMMON, variant
from tests.support.generation import SHORT_GREEDY, SHORT_PROMPTS, SHORT_SAMPLED, SYSTEM_PROMPT, token_ids_of
from tests.support.models import GQA, HEAD_FAMILIES, build_model
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_greedy_tokens_through_the_module_are_those_of_hugging_face(family: str) -> None:
    model = build_model(family)
    model.generation_config.eos_token_id = [2, 11, 40, 77, 130]  # stops somewhere, at different places
    engine = GenerationEngine.from_model(model, backend="module")
    for prompt, (completion,) in zip(SHORT_PROMPTS, engine.generate(SHORT_PROMPTS, SHORT_GREEDY), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert completion.token_ids == whole[0, len(prompt) :].tolist()
        stopped = completion.token_ids[-1] in engine.stop_token_ids
        assert completion.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_temperature_0_is_greedy_with_the_models_own_log_probs(backend: BackendName) -> None:
    """Beside requests that are drawn, and whatever else is asked for; the log-probs are those of temperature 1."""
    model = tiny_model()
    engine = GenerationEngine.from_model(model, backend=backend, stop_token_ids=())
    cold = SamplingParams(max_new_tokens=12, temperature=0)
    each = [replace(cold, seed=number, top_p=0.9 if number == 1 else 1.0) for number in range(4)] + [SHORT_SAMPLED]
    for prompt, params, (completion, *_) in zip(SHORT_PROMPTS, each, engine.generate(SHORT_PROMPTS, each), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        if params is SHORT_SAMPLED:
            continue
        assert completion.token_ids == whole[0, len(prompt) :].tolist()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1], dim=-1)
        expected = logprobs.gather(1, whole[0, len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        if params.draws_from_all:
            assert completion.sampling_logprobs == pytest.approx(completion.logprobs, abs=1e-5)


RECURRENT = {
    "qwen3_5_text": {
        **GQA,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {**GQA, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.parametrize("backend", ["auto", "module"])
@pytest.mark.parametrize("family", RECURRENT)
def test_samples_of_a_recurrent_model_end_apart(family: str, backend: BackendName) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **RECURRENT[family])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = GenerationEngine.from_model(model, stop_token_ids=(), backend=backend)
    lengths = [3, 5, 4, 12, 7]
    each = [replace(SHORT_GREEDY, max_new_tokens=length, n=2) for length in lengths]
    for prompt, length, samples in zip(SHORT_PROMPTS, lengths, engine.generate(SHORT_PROMPTS, each), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert [sample.token_ids for sample in samples] == [whole[0, len(prompt) :].tolist()] * 2


def test_the_module_ends_where_a_table_of_positions_does() -> None:
    engine = GenerationEngine.from_model(build_model("gpt2"), backend="module", stop_token_ids=())
    (completion,) = engine.generate([SHORT_PROMPTS[0]], replace(SHORT_GREEDY, max_new_tokens=100))[0]
    assert len(SHORT_PROMPTS[0]) + len(completion.token_ids) == 64 and completion.finish_reason == "length"


def test_a_stop_string_before_the_shortest_length_ends_nothing() -> None:
    tokenizer = tiny_tokenizer()
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=(), tokenizer=tokenizer)
    (free,) = engine.generate([SHORT_PROMPTS[0]], SHORT_GREEDY)[0]
    text = [tokenizer.decode([token]) for token in free.token_ids]
    early = next(n for n in range(1, 9) if text.count(text[n]) == 1)
    held = replace(SHORT_GREEDY, stop=(text[early],))
    assert engine.generate([SHORT_PROMPTS[0]], held)[0][0].token_ids == free.token_ids[: early + 1]
    assert (
        engine.generate([SHORT_PROMPTS[0]], replace(held, min_new_tokens=early + 2))[0][0].token_ids == free.token_ids
    )


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_a_completion_does_not_depend_on_its_batch(backend: BackendName) -> None:
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=range(3, 30), backend=backend)
    together = engine.generate(SHORT_PROMPTS, SHORT_SAMPLED)
    assert len({len(completion.token_ids) for samples in together for completion in samples}) > 1, "rows end apart"
    requests = per_request(SHORT_SAMPLED, len(SHORT_PROMPTS))
    for index, prompt in enumerate(SHORT_PROMPTS):
        (alone,) = engine.generate([prompt], [requests[index]])
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[index]]
    small = GenerationEngine.from_model(tiny_model(), stop_token_ids=range(3, 30), backend=backend, max_batch_rows=2)
    assert [[c.token_ids for c in s] for s in small.generate(SHORT_PROMPTS, SHORT_SAMPLED)] == [
        [c.token_ids for c in s] for s in together
    ]


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them() -> None:
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    first, again = engine.generate(SHORT_PROMPTS, SHORT_SAMPLED), engine.generate(SHORT_PROMPTS, SHORT_SAMPLED)
    assert token_ids_of(first) == token_ids_of(again), "prompts are cached by then, so log-probs may differ in rounding"
    assert first == GenerationEngine.from_model(tiny_model(), stop_token_ids=()).generate(SHORT_PROMPTS, SHORT_SAMPLED)
    assert first != engine.generate(SHORT_PROMPTS, replace(SHORT_SAMPLED, seed=8))
    assert all(a.token_ids != b.token_ids for a, b in first)
    unseeded = replace(SHORT_SAMPLED, seed=None)
    assert engine.generate(SHORT_PROMPTS, unseeded) != engine.generate(SHORT_PROMPTS, unseeded)


@pytest.mark.parametrize("backend", ["auto", "module"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_training_forward(temperature: float, backend: BackendName) -> None:
    model = tiny_model()
    sampling = replace(SHORT_SAMPLED, temperature=temperature, top_p=0.9, top_k=20)
    results = GenerationEngine.from_model(model, stop_token_ids=range(3, 10), backend=backend).generate(
        SHORT_PROMPTS, sampling
    )
    for prompt, samples in zip(SHORT_PROMPTS, results, strict=True):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids])
            mask = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                expected, _ = Policy(model)(ids, mask, mask, temperature)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected[0, len(prompt) :], atol=1e-5, rtol=1e-4)


def test_stop_tokens_end_a_completion_and_belong_to_it() -> None:
    model = tiny_model()
    free = GenerationEngine.from_model(model, stop_token_ids=()).generate(SHORT_PROMPTS, SHORT_GREEDY)
    for prompt, (completion,) in zip(SHORT_PROMPTS, free, strict=True):
        assert completion.finish_reason == "length" and len(completion.token_ids) == 12
        stop = completion.token_ids[4]
        (ended,) = GenerationEngine.from_model(model, stop_token_ids=()).generate(
            [prompt], replace(SHORT_GREEDY, stop_token_ids=(stop,))
        )[0]
        assert ended.token_ids == completion.token_ids[: completion.token_ids.index(stop) + 1]
        assert ended.finish_reason == "stop"


def module_engine(model: PreTrainedModel, stop: Iterable[int]) -> GenerationEngine:
    return GenerationEngine.from_model(model, stop_token_ids=stop, backend="module")


def test_rows_that_have_ended_cost_the_module_no_further_step() -> None:
    model = tiny_model()
    engine = module_engine(model, range(3, 60))
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda module, inputs, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    engine.generate(SHORT_PROMPTS, replace(SHORT_SAMPLED, max_new_tokens=60))
    assert len(rows) < 60, "stops once all have"
    assert rows[-1] < rows[1], "rows leave the batch"


def test_the_module_reads_the_prompt_of_n_samples_once() -> None:
    model = tiny_model()
    engine = module_engine(model, ())
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, inputs, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine.generate([SHORT_PROMPTS[0]], replace(SHORT_SAMPLED, n=4, max_new_tokens=3))
    assert shapes == [(1, 5), (4, 1), (4, 1)]


def test_a_stream_is_the_completion() -> None:
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=range(3, 30))
    request = per_request(replace(SHORT_SAMPLED, n=1), 1)[0]
    (completion,) = engine.generate([SHORT_PROMPTS[2]], [request])[0]
    assert list(engine.stream(SHORT_PROMPTS[2], replace(SHORT_SAMPLED, n=1))) == completion.token_ids


def test_bad_requests_are_refused() -> None:
    engine = GenerationEngine.from_model(tiny_model())
    with pytest.raises(UserError, match="prompt 1 has none"):
        engine.generate([[4], []], SHORT_GREEDY)
    for wrong in ({"top_p": 0.0}, {"top_k": -1}, {"n": 0}, {"max_new_tokens": 0}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [-0.5, 1e-40, 9e-6, float("inf"), float("nan")])
def test_temperatures_that_logits_cannot_be_divided_by_are_refused(temperature: float) -> None:
    """1e-40 is 0 in float32: every token was number 0, with a log-prob that is not a number."""
    with pytest.raises(UserError, match=r"temperature must be 0 \(greedy\) or a finite number of at least 1e-05, got"):
        SamplingParams(temperature=temperature)


def test_at_the_least_temperature_the_likeliest_token_is_sampled() -> None:
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=())
    coldest = engine.generate(SHORT_PROMPTS, replace(SHORT_GREEDY, temperature=1e-5, seed=1))
    assert token_ids_of(coldest) == token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_GREEDY))
    assert all(abs(logprob) < 1e-3 for samples in coldest for logprob in samples[0].logprobs)


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_token_ids_that_the_model_does_not_have_are_refused(backend: BackendName) -> None:
    """They were an IndexError, and on a GPU an assertion that ends all use of the device."""
    engine = GenerationEngine.from_model(tiny_model(), stop_token_ids=(), backend=backend)
    for prompt, stop, wrong in (([4, 259], (), 259), ([-1], (), -1), ([4], (1000,), 1000)):
        with pytest.raises(
            UserError, match=rf"token ids must be in 0\.\.258, (prompt 1|stop_token_ids) has {wrong}: remove it"
        ):
            engine.generate([[5], prompt], replace(SHORT_GREEDY, stop_token_ids=stop))
    assert engine.generate([[0, 258]], SHORT_GREEDY)[0][0].token_ids


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_a_warning_says_once_that_sequences_exceed_the_context(backend: BackendName, log_lines: list[str]) -> None:
    _warn_of_untrained_positions.cache_clear()
    model = tiny_model(max_position_embeddings=33)
    within = replace(SHORT_GREEDY, max_new_tokens=28)
    for _ in range(2):
        engine = GenerationEngine.from_model(model, stop_token_ids=(), backend=backend)
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
    kind: Any = "int8" if way == "int8" else None

    def built() -> GenerationEngine:
        return GenerationEngine.from_model(model, stop_token_ids=(), quantization=kind)

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
    engine, kept = GenerationEngine.from_model(model, stop_token_ids=()), weakref.ref(model)
    before = engine.generate(SHORT_PROMPTS, SHORT_GREEDY)
    del model
    gc.collect()
    assert kept() is None and token_ids_of(engine.generate(SHORT_PROMPTS, SHORT_GREEDY)) == token_ids_of(before)


def test_a_saved_folder_generates(model_folder) -> None:  # type: ignore[no-untyped-def]
    engine = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    assert engine.generate(SHORT_PROMPTS, SHORT_GREEDY) == GenerationEngine.from_model(tiny_model()).generate(
        SHORT_PROMPTS, SHORT_GREEDY
    )
