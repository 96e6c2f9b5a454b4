"""Adapters by name over one model: their tokens are those of the merged model alone, also at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hybrid_rlhf.cli.saved_models.loading import load_adapted
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import ServeConfig
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.adapters import adapter_merged
from tests.support.serving import KEY, server_process
from tests.support.tiny import tiny_model

NAMES = ("base", "poet", "clerk")
PROMPT = [7, 8, 9, 30]
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of the tiny model, of other layers."""
    found = {}
    for seed, (name, layers) in enumerate((("poet", ["q_proj", "down_proj"]), ("clerk", "all-linear"))):
        torch.manual_seed(seed)
        model = get_peft_model(tiny_model(), LoraConfig(r=4, lora_alpha=16, target_modules=layers))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[int]]:
    """The tokens of each merged model alone."""
    models = {"base": tiny_model()}
    models |= {
        name: PeftModel.from_pretrained(tiny_model(), folder).merge_and_unload() for name, folder in folders.items()
    }
    return {
        name: GenerationEngine.from_model(model.eval(), stop_token_ids=[2]).generate([PROMPT], GREEDY)[0][0].token_ids
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def client(model_folder: Path, folders: dict[str, str]) -> Iterator[openai.OpenAI]:
    adapters = "{" + ", ".join(f"{name}: {folder}" for name, folder in folders.items()) + "}"
    line = [str(model_folder), "--model_name", "base", "--adapters", adapters, "--kv_cache_gib", "0.01"]
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


def test_a_merged_adapter_leaves_no_trace_and_shares_what_it_does_not_adapt(folders: dict[str, str]) -> None:
    model = tiny_model()
    before = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    with adapter_merged(model, folders["poet"]):
        changed = {name for name, weight in model.named_parameters() if weight is not before[name][0]}
    assert changed == {
        f"model.layers.{n}.{name}.weight" for n in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    for name, weight in model.named_parameters():
        assert weight is before[name][0] and torch.equal(weight, before[name][1])


def test_mistakes_are_named(model_folder: Path, folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kv_cache_gib must be given with adapters"):
        ServeConfig(path="m", adapters={"a": "b"})
    with pytest.raises(UserError, match="adapters must have other names than the model, got a"):
        ServeConfig(path="m", model_name="a", adapters={"a": "b"}, kv_cache_gib=1.0)
    config = ServeConfig(path=str(model_folder))
    with pytest.raises(UserError, match="an adapter is a folder with adapter_config.json"):
        load_adapted(config, {"a": str(tmp_path)}, kv_cache_gib=0.01)
    other = get_peft_model(tiny_model(hidden_size=64), LoraConfig(r=2, target_modules=["q_proj"]))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="must fit LlamaForCausalLM"):
        load_adapted(config, {"a": str(tmp_path)}, kv_cache_gib=0.01)
    dora = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    dora.save_pretrained(tmp_path / "dora")
    with pytest.raises(UserError, match="must be LoRA without DoRA"):
        load_adapted(config, {"a": str(tmp_path / "dora")}, kv_cache_gib=0.01)
