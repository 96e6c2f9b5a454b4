"""Adapters by name over one model: their tokens are those of the merged model alone, also at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from hybrid_rlhf.cli.saved_models.loading import engine_at, find_model
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.adapters import read_adapter
from tests.support.families import variant
from tests.support.serving import KEY, server_process
from tests.support.tiny import tiny_model

NAMES = ("base", "poet", "clerk")
PROMPT = [7, 8, 9, 30]
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40)


def random_adapter(model: PreTrainedModel, folder: Path, seed: int, layers: str | list[str]) -> str:
    """The folder of an adapter that changes much."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=4 + seed, lora_alpha=16, target_modules=layers))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of the tiny model, of other layers and ranks."""
    each = {"poet": ["q_proj", "down_proj"], "clerk": "all-linear"}
    return {
        name: random_adapter(tiny_model(), tmp_path_factory.mktemp(name), seed, layers)
        for seed, (name, layers) in enumerate(each.items())
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[int]]:
    """The tokens of each merged model alone."""
    models = {"base": tiny_model()} | {name: merged(tiny_model(), folder) for name, folder in folders.items()}
    return {
        name: GenerationEngine.from_model(model.eval(), stop_token_ids=[2]).generate([PROMPT], GREEDY)[0][0].token_ids
        for name, model in models.items()
    }


def merged(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    return PeftModel.from_pretrained(model, folder).merge_and_unload().eval()


@pytest.fixture(scope="module")
def client(model_folder: Path, folders: dict[str, str]) -> Iterator[openai.OpenAI]:
    adapters = "{" + ", ".join(f"{name}: {folder}" for name, folder in folders.items()) + "}"
    line = [str(model_folder), "--model_name", "base", "--adapters", adapters]
    with server_process([*line, "--max_sequence_tokens", "200", "--max_batch_rows", "4"]) as (_, url):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)


def test_each_name_has_its_own_tokens_also_at_the_same_time(
    client: openai.OpenAI, expected: dict[str, list[int]]
) -> None:
    assert len({tuple(ids) for ids in expected.values()}) == 3
    found: dict[int, tuple[str, list[int]]] = {}

    def ask(number: int) -> None:
        name = NAMES[number % 3]
        answer = client.completions.create(
            model=name,
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            extra_body={"return_token_ids": True, "min_tokens": 40},
        )
        found[number] = name, answer.choices[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(12)] == [(NAMES[n % 3], expected[NAMES[n % 3]]) for n in range(12)]


def test_adapters_are_listed_with_their_parent(client: openai.OpenAI) -> None:
    listed = {model.id: getattr(model, "parent", None) for model in client.models.list()}
    assert listed == {"base": None, "poet": "base", "clerk": "base"}
    assert client.models.retrieve("poet").parent == "base"
    with pytest.raises(openai.NotFoundError, match="the model of this server is base, poet, clerk, got 'x'"):
        client.completions.create(model="x", prompt="x")


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


def test_a_rank_above_the_width_of_a_weight_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=200, lora_alpha=16, target_modules=["o_proj", "down_proj", "q_proj"])
    adapted = get_peft_model(tiny_model(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path)
    engine = GenerationEngine.from_model(tiny_model().eval(), stop_token_ids=[2], adapters={"wide": str(tmp_path)})
    wanted = GenerationEngine.from_model(merged(tiny_model(), str(tmp_path)), stop_token_ids=[2])
    assert engine.generate([PROMPT], GREEDY, adapters=["wide"])[0][0].token_ids == (
        wanted.generate([PROMPT], GREEDY)[0][0].token_ids
    )


def test_reading_an_adapter_leaves_no_trace_and_takes_the_memory_of_its_factors(folders: dict[str, str]) -> None:
    model = tiny_model()
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    changes = read_adapter(model, folders["poet"])
    assert set(changes) == {
        f"model.layers.{n}.{name}.weight" for n in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert all(change.up.shape[1] == len(change.down) == 4 for change in changes.values())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, weight in after.items():
        assert weight is before[name][0] and torch.equal(weight, before[name][1])


def test_mistakes_are_named(model_folder: Path, folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adapters must have other names than the model, got a"):
        ServeConfig(path="m", model_name="a", adapters={"a": "b"})
    place = find_model(ServeConfig(path=str(model_folder)))
    with pytest.raises(UserError, match="an adapter is a folder with adapter_config.json"):
        engine_at(place, kv_cache_gib=None, adapters={"a": str(tmp_path)})
    other = get_peft_model(tiny_model(hidden_size=64), LoraConfig(r=2, target_modules=["q_proj"]))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="must fit LlamaForCausalLM"):
        engine_at(place, kv_cache_gib=None, adapters={"a": str(tmp_path)})
    dora = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    dora.save_pretrained(tmp_path / "dora")
    with pytest.raises(UserError, match="must be LoRA that changes weights alone, .* is LORA, use_dora: merge"):
        engine_at(place, kv_cache_gib=None, adapters={"a": str(tmp_path / "dora")})
    tokens = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6]))
    tokens.save_pretrained(tmp_path / "tokens")
    with pytest.raises(UserError, match="changes weights alone, .* is LORA, trainable_token_indices: merge"):
        engine_at(place, kv_cache_gib=None, adapters={"a": str(tmp_path / "tokens")})
    head = random_adapter(tiny_model(tie_word_embeddings=True), tmp_path / "head", 0, ["lm_head"])
    with pytest.raises(UserError, match="attention and dense MLPs, a changes lm_head.weight"):
        GenerationEngine.from_model(tiny_model(tie_word_embeddings=True), adapters={"a": head})
    embedding = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["embed_tokens"]))
    embedding.save_pretrained(tmp_path / "embedding")
    with pytest.raises(UserError, match="must change linear layers .*embed_tokens \\(Embedding"):
        engine_at(place, kv_cache_gib=None, adapters={"a": str(tmp_path / "embedding")})
    latent = random_adapter(variant("deepseek_v3"), tmp_path / "latent", 0, ["kv_a_proj_with_mqa"])
    with pytest.raises(UserError, match="adapters are for products of attention and dense MLPs, a changes .*kv_a"):
        GenerationEngine.from_model(variant("deepseek_v3"), adapters={"a": latent})
    with pytest.raises(UserError, match="an adapter must be one of the engine's, none, got x"):
        GenerationEngine.from_model(tiny_model()).generate([PROMPT], GREEDY, adapters=["x"])
    with pytest.raises(UserError, match="adapters are one per prompt, got 1 for 2"):
        GenerationEngine.from_model(tiny_model()).generate([PROMPT, PROMPT], GREEDY, adapters=["x"])
    with pytest.raises(UserError, match="need inference weights in the model's dtype, got quantization int8"):
        GenerationEngine.from_model(tiny_model(), adapters=folders, quantization="int8")
    with pytest.raises(UserError, match="need inference weights in the model's dtype, got backend module"):
        GenerationEngine.from_model(tiny_model(), adapters=folders, backend="module")
