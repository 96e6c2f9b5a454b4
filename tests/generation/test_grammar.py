"""Completions that follow a grammar: always valid, drawn from the masked distribution, in any batch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.generation import Completion, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching import capacity, continuous, grammar
from hybrid_rlhf.generation.batching.grammar import (
    CompiledGrammar,
    compile_untrusted,
    grammar_of,
    source_of,
)
from hybrid_rlhf.generation.open_batch import PromptBatch
from tests.support.devices import DEVICES, needs_gpu
from tests.support.errors import user_error
from tests.support.generation import Steps, completed, ids_of, keep_in_flight, token_ids_of
from tests.support.tiny import VOCABULARY, tiny_model, tiny_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
PROMPTS = [[5, 6, 7], [80, 81], [40] * 30]
CONSTRAINED = SamplingParams(max_new_tokens=120, seed=3, n=2, response_format=FORMAT)


def engine_of(backend: str = "auto", *, device: str = "cpu", **more: Any) -> GenerationEngine:
    return GenerationEngine.from_model(
        tiny_model().to(device), tokenizer=tiny_tokenizer(), stop_token_ids=[2], backend=backend, **more
    )


def read(ids: list[int]) -> dict[str, Any]:
    value = json.loads(tiny_tokenizer().decode(ids, skip_special_tokens=True))
    return value


@pytest.mark.parametrize("backend", ["auto", "module"])
def test_completions_are_valid_and_log_probs_are_those_of_the_masked_distribution(backend: str) -> None:
    """A slow version masks the logits of the whole model by hand, token by token."""
    model = tiny_model()
    for prompt, samples in zip(PROMPTS, engine_of(backend).generate(PROMPTS, CONSTRAINED), strict=True):
        for sample in samples:
            animal = read(sample.token_ids)
            assert animal["kind"] in ("cat", "dog") and 1 <= animal["legs"] <= 99 and len(animal) == 2
            assert sample.finish_reason == "stop" and sample.token_ids[-1] == 2
            state = grammar_of(source_of(FORMAT), tiny_tokenizer(), vocab_size=VOCABULARY, stop=frozenset({2}))
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
            for place, token in enumerate(sample.token_ids):
                bits = torch.frombuffer(bytearray(state.matcher.compute_bitmask()), dtype=torch.uint8)
                allowed = ((bits[:, None] >> torch.arange(8)) & 1).flatten()[:VOCABULARY].bool()
                masked = logits[place].masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
                assert sample.sampling_logprobs[place] == pytest.approx(float(masked[token]), abs=1e-4)
                full = float(logits[place].log_softmax(dim=-1)[token])
                assert sample.logprobs[place] == pytest.approx(full, abs=1e-4)
                if token != 2:
                    state.append(token)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_and_without_grammars_do_not_change_each_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are preempted, wait, and move to other places."""
    free = SamplingParams(max_new_tokens=40, seed=9)
    kinds = [CONSTRAINED, free, CONSTRAINED, free, free, CONSTRAINED]
    mixed = [replace(params, n=1, seed=place) for place, params in enumerate(kinds)]
    prompts = [PROMPTS[place % 3] for place in range(len(mixed))]
    alone = [engine_of(device=device).generate([p], [s])[0][0].token_ids for p, s in zip(prompts, mixed, strict=True)]
    for rows in (2, 6):
        found = engine_of(device=device, max_batch_rows=rows).generate(prompts, mixed)
        assert [samples[0].token_ids for samples in found] == alone
    monkeypatch.setattr(continuous.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    small = engine_of(device=device, kv_cache_gib=11 * 4096 / 2**30)
    assert [samples[0].token_ids for samples in small.generate(prompts, mixed)] == alone
    assert small.backend.preemptions > 0


def test_a_begun_completion_goes_on_within_its_grammar() -> None:
    engine = engine_of()
    (whole,) = engine.generate(PROMPTS[:1], replace(CONSTRAINED, n=1))
    part = whole[0]
    begun = Completion(part.token_ids[:5], part.logprobs[:5], None, part.sampling_logprobs[:5])
    (again,) = engine.generate(PROMPTS[:1], replace(CONSTRAINED, n=1), begun=[[begun]])
    assert again[0].token_ids == whole[0].token_ids


@pytest.mark.parametrize("device", DEVICES)
def test_an_open_batch_takes_grammars_while_it_decodes(device: str) -> None:
    """Also where decoding has failed with one request: the others go back to their delivered tokens."""
    engine = engine_of(device=device)
    expected = token_ids_of(engine.generate(PROMPTS, CONSTRAINED))
    free = SamplingParams(max_new_tokens=100, seed=1, min_new_tokens=100)
    with engine_of(device=device).open(rows=4, max_tokens=200) as batch:
        steps = Steps()
        batch.submit(PromptBatch([[9, 9]], free), steps.put)
        assert ids_of(completed(batch, PROMPTS, CONSTRAINED)) == expected
        running = [token.token_id for _ in range(100) for token in steps.get(timeout=60)]
        assert running == engine.generate([[9, 9]], free)[0][0].token_ids


@pytest.mark.gpu
@needs_gpu
def test_kernels_and_graphs_constrain_as_torch_does() -> None:
    """Free, biased and constrained rows of one batch have the greedy tokens that torch's operations give on a CPU."""
    greedy = SamplingParams(max_new_tokens=60, temperature=0.0)
    mixed = [
        replace(greedy, response_format=FORMAT),
        greedy,
        replace(greedy, presence_penalty=0.5, frequency_penalty=0.2),
        replace(greedy, logit_bias={70: 1.0}),
    ]
    prompts = [*PROMPTS, [9]]
    found, expected = (token_ids_of(engine_of(device=device).generate(prompts, mixed)) for device in ("cuda", "cpu"))
    assert found == expected


def test_the_mask_is_that_of_the_last_token_also_where_steps_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU launches a step before the tokens of the last one are known."""
    expected = token_ids_of(engine_of().generate(PROMPTS, CONSTRAINED))
    keep_in_flight(monkeypatch, 1)
    assert token_ids_of(engine_of().generate(PROMPTS, CONSTRAINED)) == expected


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"type": "xml"}, "response_format must be of type text, json_object, json_schema or lark"),
        ({"type": "json_schema"}, "needs json_schema.schema, got None"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "zzz"}}}, "must be a grammar that compiles, got"),
        ({"type": "lark", "lark": "start: nothing"}, "must be a grammar that compiles, got"),
    ],
)
def test_faulty_grammars_are_named(given: dict[str, Any], rule: str) -> None:
    with user_error(rule):
        engine_of().generate(PROMPTS[:1], SamplingParams(response_format=given))


def test_what_contradicts_a_grammar_is_refused() -> None:
    with user_error("decides where a completion ends"):
        SamplingParams(response_format=FORMAT, min_new_tokens=3)
    with user_error("needs a tokenizer, the engine has none"):
        GenerationEngine.from_model(tiny_model(), stop_token_ids=[2]).generate([[5]], CONSTRAINED)
    with user_error("needs a stop token, the engine has none"):
        GenerationEngine.from_model(tiny_model(), tokenizer=tiny_tokenizer(), stop_token_ids=[]).generate(
            [[5]], CONSTRAINED
        )


def test_without_its_package_a_grammar_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rlhf.generation.batching.grammar.find_spec", lambda name: None)
    with user_error(r"needs llguidance, .*pip install 'hybrid_rlhf\[serve\]'"):
        engine_of().generate([[5]], CONSTRAINED)


@pytest.fixture(scope="module")
def untrusted() -> Iterator[Callable[..., CompiledGrammar]]:
    """Compiles a grammar as a server does, with 100 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_MOST_BYTES", 100 * 2**20)
        patch.setattr(grammar, "_checker", functools.cache(grammar._Checker))
        tokenizer = tiny_tokenizer()

        def compiled(source: str, wanted: Callable[[], bool] = lambda: True) -> CompiledGrammar:
            return compile_untrusted((source, tokenizer, VOCABULARY, frozenset({2})), wanted)

        compiled("start: /a/")
        yield compiled


ENDLESS = "start: A\nA: /(.*a.{30}.*)/ & /(.*b.{31}.*)/ & ~/(.*d.{33}.*)/ & ~/(.*e.{35}.*)/"
"""Compiling it takes 50 MB a second without an end."""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "more than 10 s or 100 MiB"),
        ("start: nothing", "unknown name"),
        ("start: start", "no finite text"),
        ('start: %json {"$ref": "#"}', "no finite text"),
        ("start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + "\nr60: r0", "no finite text"),
    ],
    ids=["endless", "faulty", "itself", "schema", "doubling"],
)
def test_a_grammar_that_exceeds_its_limits_or_has_no_text_is_refused(
    untrusted: Callable[..., CompiledGrammar], source: str, reason: str
) -> None:
    """Without a process of its own, an endless one takes the memory of the host; the next grammar is compiled."""
    with pytest.raises(UserError, match=reason):
        untrusted(source)
    assert untrusted(f"start: /b/ // {reason}").size > 0


def test_a_grammar_whose_client_leaves_is_not_compiled_to_its_end(untrusted: Callable[..., CompiledGrammar]) -> None:
    looks = iter([True, True])  # it leaves while the grammar is being compiled
    with pytest.raises(UserError, match="has left"):
        untrusted(ENDLESS, wanted=lambda: next(looks, False))
    assert untrusted("start: /c/").size > 0


def test_kept_grammars_are_counted_by_bytes(
    untrusted: Callable[..., CompiledGrammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of grammars says nothing of their memory; one that is in use stays compiled."""
    monkeypatch.setattr(grammar, "_KEPT_BYTES", 2**18)
    sources = [f"start: %json {json.dumps({'enum': [f'{n}-{place}' for place in range(500)]})}" for n in range(4)]
    used = untrusted(sources[0])
    sizes = [untrusted(source).size for source in sources]
    assert min(sizes) > 500 * 8 and sum(sizes) > 2**18 >= grammar._grammars._bytes
    assert untrusted(sources[0]) is used


def test_a_completion_that_cannot_be_finished_fails_alone() -> None:
    """llguidance allows the stop token there, which is no end of a text."""
    endless = {"type": "lark", "lark": 'start: "a" rest\nrest: rest'}
    expected = token_ids_of(engine_of().generate(PROMPTS, CONSTRAINED))
    with engine_of().open(rows=8, max_tokens=200) as batch:
        steps = Steps()
        failing = batch.submit(
            PromptBatch([[9, 9]], SamplingParams(max_new_tokens=50, response_format=endless, seed=1)), steps.put
        )
        assert ids_of(completed(batch, PROMPTS, CONSTRAINED)) == expected
        while steps.get(timeout=60):
            pass
        assert "a finite text" in str(failing.error)
