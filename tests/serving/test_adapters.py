"""Adapters by name over one model: their tokens are those of the merged model alone. test_models.py serves some."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from hybrid_rlhf.cli.saved_models.loading import engine_at, find_model
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.open_batch import PromptBatch, StreamedToken
from hybrid_rlhf.models.pretrained.adapters import read_adapter
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.models import random_adapter
from tests.support.tiny import tiny_model

PROMPT = [7, 8, 9, 30]
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40)


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    return PeftModel.from_pretrained(model, folder).merge_and_unload().eval()


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama with biases", ["q_proj", "v_proj", "gate_proj", "down_proj"]),
        ("gpt2", ["c_attn", "c_proj"]),  # stored [in, out], queries, keys and values in one
        ("cohere", "all-linear"),  # rows of queries and keys in another order
        ("qwen3_next", ["q_proj", "k_proj", "o_proj"]),  # gates among the queries, recurrent layers beside
    ],
)
def test_a_batch_of_several_adapters_computes_what_merged_models_do(family: str, layers: Any, tmp_path: Path) -> None:
    """Also with prefixes that another adapter has computed of the same tokens, and with more rows than run at once."""
    folders = {name: random_adapter(variant(family), tmp_path / name, n, layers) for n, name in enumerate(("a", "b"))}
    engine = GenerationEngine.from_model(
        variant(family).eval(), stop_token_ids=[], adapters=folders, max_batch_rows=5, prefill_tokens=24
    )
    names, prompts = [None, "a", "b"], [[7, 8, 9] * 12, PROMPT]
    each = {None: variant(family).eval()} | {name: merged(variant(family), folder) for name, folder in folders.items()}
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    alone = [GenerationEngine.from_model(each[name], stop_token_ids=[]).generate(prompts, greedy) for name in names]
    for _ in range(2):
        found = engine.generate(prompts * 3, greedy, adapters=[name for name in names for _ in prompts])
        for (completion,), (wanted,) in zip(found, [one for own in alone for one in own], strict=True):
            assert completion.token_ids == wanted.token_ids
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), torch.tensor(wanted.logprobs), atol=1e-4, rtol=0
            )
    firsts = {own[1][0].logprobs[0] for own in alone}
    assert len(firsts) == 3, "the adapters change something"


def test_adapters_come_and_go_while_an_open_batch_decodes(tmp_path: Path) -> None:
    """A replaced adapter's cached prefixes do not match, and a request that decodes meanwhile keeps its own."""
    folders = [random_adapter(tiny_model(), tmp_path / str(n), n, ["q_proj", "v_proj", "down_proj"]) for n in range(3)]
    lm = tiny_model().eval()
    factors = [read_adapter(lm, folder) for folder in folders]
    alone = [GenerationEngine.from_model(merged(tiny_model(), folder), stop_token_ids=[]) for folder in folders]
    wanted = [engine.generate([PROMPT * 9], GREEDY)[0][0] for engine in alone]
    engine = GenerationEngine.from_model(lm, stop_token_ids=[], cuda_graphs=False)
    plain = engine.generate([PROMPT * 9], GREEDY)[0][0]
    with engine.open(rows=4, max_tokens=100) as batch:

        def ask(adapter: str | None) -> Future[list[int]]:
            ended: Future[list[int]] = Future()
            tokens: list[int] = []

            def deliver(new: list[StreamedToken]) -> None:
                tokens.extend(token.token_id for token in new)
                if new[-1].finish_reason is not None:
                    ended.set_result(tokens)

            batch.submit(PromptBatch([PROMPT * 9], GREEDY, adapter=adapter), deliver)
            return ended

        batch.call(lambda: engine.set_adapter("kept", factors[0])).result()
        running = ask("kept")
        for number in (1, 2, 1):
            batch.call(partial(engine.set_adapter, "a", factors[number])).result()
            assert ask("a").result() == wanted[number].token_ids
        assert running.result() == ask("kept").result() == wanted[0].token_ids
        batch.call(lambda: engine.remove_adapters(["a"])).result()
        assert engine.adapters == ("kept",)
        batch.call(lambda: engine.remove_adapters(["kept"])).result()
        assert ask(None).result() == plain.token_ids
        with user_error("an adapter must be one of the engine's, none, got a"):
            ask("a")


def test_a_rank_above_the_width_of_a_weight_is_kept(tmp_path: Path) -> None:
    random_adapter(tiny_model(), tmp_path, 196, ["o_proj", "down_proj", "q_proj"])  # of rank 200
    engine = GenerationEngine.from_model(tiny_model().eval(), stop_token_ids=[2], adapters={"wide": str(tmp_path)})
    wanted = GenerationEngine.from_model(merged(tiny_model(), str(tmp_path)), stop_token_ids=[2])
    assert engine.generate([PROMPT], GREEDY, adapters=["wide"])[0][0].token_ids == (
        wanted.generate([PROMPT], GREEDY)[0][0].token_ids
    )


def test_reading_an_adapter_leaves_no_trace_and_takes_the_memory_of_its_factors(tmp_path: Path) -> None:
    model = tiny_model()
    folder = random_adapter(tiny_model(), tmp_path, 0, ["q_proj", "down_proj"])
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    changes = read_adapter(model, folder)
    assert len(changes) == 4 and all(change.up.shape[1] == len(change.down) == 4 for change in changes.values())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, weight in after.items():
        assert weight is before[name][0] and torch.equal(weight, before[name][1])


def test_mistakes_are_named(model_folder: Path, tmp_path: Path) -> None:
    with user_error("adapters must have other names than the model, got a"):
        ServeConfig(path="m", model_name="a", adapters={"a": "b"})
    with user_error("adapters must have names without parts . and .., .* got ../z: rename it"):
        ServeConfig(path="m", adapters={"../z": "b"})
    place = find_model(ServeConfig(path=str(model_folder)))

    def adapter(name: str, lm: PreTrainedModel | None = None, **settings: Any) -> Path:
        get_peft_model(
            lm or tiny_model(), LoraConfig(r=2, **{"target_modules": ["q_proj"], **settings})
        ).save_pretrained(tmp_path / name)
        return tmp_path / name

    for folder, rule in (
        (tmp_path, "an adapter is a folder with adapter_config.json"),
        (adapter("other", tiny_model(hidden_size=64)), "must fit LlamaForCausalLM"),
        (adapter("dora", use_dora=True), "must be LoRA that changes weights alone, .* is LORA, use_dora: merge"),
        (adapter("pissa", init_lora_weights="pissa"), "is LORA, init_lora_weights pissa: merge"),
        (adapter("tokens", trainable_token_indices=[5, 6]), "is LORA, trainable_token_indices: merge"),
        *(
            [(adapter("kasa", kasa_config=peft.KasaConfig()), "is LORA, kasa_config: merge")]
            if hasattr(peft, "KasaConfig")
            else ()
        ),
        (
            adapter("embedding", target_modules=["embed_tokens"]),
            "must change linear layers .*embed_tokens \\(Embedding",
        ),
    ):
        with user_error(rule):
            engine_at(place, kv_cache_gib=None, adapters={"a": str(folder)})
    for lm, layer, settings, rule in (
        (tiny_model(), "lm_head", {}, "attention and dense MLPs, a changes lm_head.weight"),
        (
            variant("deepseek_v3"),
            "kv_a_proj_with_mqa",
            {},
            "adapters are for products of attention and dense MLPs, a changes .*kv_a",
        ),
        (
            tiny_model(),
            "q_proj",
            {"quantization": "int8"},
            "need inference weights in the model's dtype, got quantization int8",
        ),
        (tiny_model(), "q_proj", {"backend": "module"}, "inference weights in the model's dtype, got backend module"),
    ):
        with user_error(rule):
            GenerationEngine.from_model(
                lm, adapters={"a": random_adapter(copy.deepcopy(lm), tmp_path / layer, 0, [layer])}, **settings
            )
    engine = GenerationEngine.from_model(tiny_model())
    with user_error("an adapter must be one of the engine's, none, got x"):
        engine.generate([PROMPT], GREEDY, adapters=["x"])
    with user_error("adapters are one per prompt, got 1 for 2"):
        engine.generate([PROMPT, PROMPT], GREEDY, adapters=["x"])
