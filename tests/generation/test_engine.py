"""Generation against Hugging Face's generate, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.engine import Layout
from hybrid_rlhf.generation.sampling import per_request
from hybrid_rlhf.models.policy import Policy
from tests.models.test_policy import COMMON, FAMILIES, GQA, build
from tests.tiny import tiny_model, tiny_tokenizer

GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 200, (length,), generator=GENERATOR).tolist() for length in (5, 1, 9, 3, 7)]
GREEDY = SamplingParams(max_new_tokens=12, greedy=True)
SAMPLED = SamplingParams(max_new_tokens=12, seed=7, n=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_through_the_module_are_those_of_hugging_face(family: str) -> None:
    model = build(family)
    model.generation_config.eos_token_id = [2, 11, 40, 77, 130]  # stops somewhere, at different places
    engine = GenerationEngine(model, layout="module")
    for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert completion.token_ids == whole[0, len(prompt) :].tolist()
        stopped = completion.token_ids[-1] in engine.stop_token_ids
        assert completion.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("layout", ["auto", "module"])
def test_temperature_0_is_greedy_with_the_models_own_log_probs(layout: Layout) -> None:
    """Beside requests that are drawn, and whatever else is asked for; the log-probs are those of temperature 1."""
    model = tiny_model()
    engine = GenerationEngine(model, layout=layout, stop_token_ids=())
    cold = SamplingParams(max_new_tokens=12, temperature=0)
    each = [replace(cold, seed=number, top_p=0.9 if number == 1 else 1.0) for number in range(4)] + [SAMPLED]
    for prompt, params, (completion, *_) in zip(PROMPTS, each, engine.generate(PROMPTS, each), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        if params is SAMPLED:
            continue
        assert completion.token_ids == whole[0, len(prompt) :].tolist()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1], dim=-1)
        expected = logprobs.gather(1, whole[0, len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        if params.draws_from_all:
            assert completion.sampling_logprobs == pytest.approx(completion.logprobs, abs=1e-5)


RECURRENT = {
    "qwen3_5_text": {**GQA, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                     "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {**GQA, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("family", RECURRENT)
def test_samples_of_a_recurrent_model_end_apart(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **RECURRENT[family])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = GenerationEngine(model, stop_token_ids=())
    lengths = [3, 5, 4, 12, 7]
    each = [replace(GREEDY, max_new_tokens=length, n=2) for length in lengths]
    for prompt, length, samples in zip(PROMPTS, lengths, engine.generate(PROMPTS, each), strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False,
                               pad_token_id=0, eos_token_id=None)  # fmt: skip
        assert [sample.token_ids for sample in samples] == [whole[0, len(prompt) :].tolist()] * 2


def test_the_module_ends_where_a_table_of_positions_does() -> None:
    engine = GenerationEngine(build("gpt2"), layout="module", stop_token_ids=())
    (completion,) = engine.generate([PROMPTS[0]], replace(GREEDY, max_new_tokens=100))[0]
    assert len(PROMPTS[0]) + len(completion.token_ids) == 64 and completion.finish_reason == "length"


def test_a_stop_string_before_the_shortest_length_ends_nothing() -> None:
    engine = GenerationEngine(tiny_model(), stop_token_ids=(), tokenizer=tiny_tokenizer())
    (free,) = engine.generate([PROMPTS[0]], GREEDY)[0]
    text = [engine._tokenizer.decode([token]) for token in free.token_ids]  # type: ignore[union-attr]
    early = next(n for n in range(1, 9) if text.count(text[n]) == 1)
    held = replace(GREEDY, stop_strings=(text[early],))
    assert engine.generate([PROMPTS[0]], held)[0][0].token_ids == free.token_ids[: early + 1]
    assert engine.generate([PROMPTS[0]], replace(held, min_new_tokens=early + 2))[0][0].token_ids == free.token_ids


@pytest.mark.parametrize("layout", ["auto", "module"])
def test_a_completion_does_not_depend_on_its_company(layout: Layout) -> None:
    engine = GenerationEngine(tiny_model(), stop_token_ids=range(3, 30), layout=layout)
    together = engine.generate(PROMPTS, SAMPLED)
    assert len({len(completion.token_ids) for samples in together for completion in samples}) > 1, "rows end apart"
    requests = per_request(SAMPLED, len(PROMPTS))
    for index, prompt in enumerate(PROMPTS):
        (alone,) = engine.generate([prompt], [requests[index]])
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[index]]
    small = GenerationEngine(tiny_model(), stop_token_ids=range(3, 30), layout=layout, max_batch_rows=2)
    assert [[c.token_ids for c in s] for s in small.generate(PROMPTS, SAMPLED)] == [
        [c.token_ids for c in s] for s in together
    ]


def test_samples_of_a_prompt_differ_and_a_seed_repeats_them() -> None:
    engine = GenerationEngine(tiny_model(), stop_token_ids=())
    first, again = engine.generate(PROMPTS, SAMPLED), engine.generate(PROMPTS, SAMPLED)
    assert first == again
    assert first != engine.generate(PROMPTS, replace(SAMPLED, seed=8))
    assert all(a.token_ids != b.token_ids for a, b in first)
    unseeded = replace(SAMPLED, seed=None)
    assert engine.generate(PROMPTS, unseeded) != engine.generate(PROMPTS, unseeded)


@pytest.mark.parametrize("layout", ["auto", "module"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_training_forward(temperature: float, layout: Layout) -> None:
    model = tiny_model()
    sampling = replace(SAMPLED, temperature=temperature, top_p=0.9, top_k=20)
    results = GenerationEngine(model, stop_token_ids=range(3, 10), layout=layout).generate(PROMPTS, sampling)
    for prompt, samples in zip(PROMPTS, results, strict=True):
        for sample in samples:
            ids = torch.tensor([prompt + sample.token_ids])
            mask = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                expected, _ = Policy(model)(ids, mask, mask, temperature)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected[0, len(prompt) :], atol=1e-5, rtol=1e-4)


def test_stop_tokens_end_a_completion_and_belong_to_it() -> None:
    model = tiny_model()
    free = GenerationEngine(model, stop_token_ids=()).generate(PROMPTS, GREEDY)
    for prompt, (completion,) in zip(PROMPTS, free, strict=True):
        assert completion.finish_reason == "length" and len(completion.token_ids) == 12
        stop = completion.token_ids[4]
        (ended,) = GenerationEngine(model, stop_token_ids=()).generate(
            [prompt], replace(GREEDY, stop_token_ids=(stop,))
        )[0]
        assert ended.token_ids == completion.token_ids[: completion.token_ids.index(stop) + 1]
        assert ended.finish_reason == "stop"


def module_engine(model: PreTrainedModel, stop: Iterable[int]) -> GenerationEngine:
    return GenerationEngine(model, stop_token_ids=stop, layout="module")


def test_rows_that_have_ended_cost_the_module_no_further_step() -> None:
    model = tiny_model()
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda module, inputs, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    module_engine(model, range(3, 60)).generate(PROMPTS, replace(SAMPLED, max_new_tokens=60))
    assert len(rows) < 60, "stops once all have"
    assert rows[-1] < rows[1], "rows leave the batch"


def test_the_module_reads_the_prompt_of_n_samples_once() -> None:
    model = tiny_model()
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, inputs, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    module_engine(model, ()).generate([PROMPTS[0]], replace(SAMPLED, n=4, max_new_tokens=3))
    assert shapes == [(1, 5), (4, 1), (4, 1)]


def test_a_stream_is_the_completion() -> None:
    engine = GenerationEngine(tiny_model(), stop_token_ids=range(3, 30))
    request = per_request(replace(SAMPLED, n=1), 1)[0]
    (completion,) = engine.generate([PROMPTS[2]], [request])[0]
    assert list(engine.stream(PROMPTS[2], replace(SAMPLED, n=1))) == completion.token_ids


def test_bad_requests_are_refused() -> None:
    engine = GenerationEngine(tiny_model())
    with pytest.raises(UserError, match="prompt 1 has none"):
        engine.generate([[4], []], GREEDY)
    for wrong in ({"temperature": -0.5}, {"top_p": 0.0}, {"top_k": -1}, {"n": 0}, {"max_new_tokens": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_saved_folder_generates(model_folder) -> None:  # type: ignore[no-untyped-def]
    engine = GenerationEngine.from_pretrained(str(model_folder), dtype=torch.float32)
    assert engine.generate(PROMPTS, GREEDY) == GenerationEngine(tiny_model()).generate(PROMPTS, GREEDY)
