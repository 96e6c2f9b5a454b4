"""`hybrid-rlhf export`: the folder or file that it writes is the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rlhf.cli.saved_models import export
from hybrid_rlhf.models.head_check import module_logprobs
from tests.support.commands import CommandLine
from tests.support.models import random_adapter
from tests.support.tiny import VOCABULARY, save_tiny, tiny_model, tiny_tokenizer

PROBE = list(range(3, 40))


def logprobs(folder: Path) -> torch.Tensor:
    """Of a folder, by Hugging Face."""
    return module_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), PROBE)


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """Of the tiny model."""
    return random_adapter(tiny_model(), tmp_path / "adapter", 0, ["q_proj", "down_proj"])


def test_dtype_shards_and_card(model_folder: Path, tmp_path: Path, cli: CommandLine) -> None:
    source = save_tiny(tmp_path / "source", tiny_model())
    (source / "README.md").write_text("# Mine\n")
    output = tmp_path / "out"
    ended = cli(f"export {source} --output {output} --dtype bfloat16 --shard_gib 0.00001")
    assert len(list(output.glob("model-*.safetensors"))) > 1
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    weights = [value for file in output.glob("*.safetensors") for value in load_file(file).values()]
    assert {value.dtype for value in weights} == {torch.bfloat16}
    torch.testing.assert_close(logprobs(output), logprobs(model_folder), atol=0.1, rtol=0.1)
    assert (output / "README.md").read_text() == "# Mine\n" and (output / "tokenizer.json").is_file()
    assert f"{output}: bfloat16, " in ended.out
    assert not list(tmp_path.glob(".*"))


def test_weights_that_are_not_in_the_result_are_named(
    model_folder: Path, tmp_path: Path, cli: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    source = shutil.copytree(model_folder, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "mtp.fc.weight": torch.ones(2)}, source / "model.safetensors", metadata={"format": "pt"})
    assert cli(f"export {source} --output {tmp_path / 'out'}").code == 0
    assert "neither trained nor in what is saved: mtp.* (1)" in caplog.text
    assert "mtp.fc.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("layers", [["embed_tokens"], ["q_proj", "lm_head"], ["q_proj", "embed_tokens", "lm_head"]])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_an_adapter_of_a_tied_embedding_unties_the_head(
    layers: list[str], kind: str, model_folder: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """Merged into the shared weight, it would change the other layer too."""
    adapter = random_adapter(tiny_model(), tmp_path / "adapter", 1, layers)
    expected = module_logprobs(PeftModel.from_pretrained(tiny_model(), adapter).eval(), PROBE)
    if kind == "gguf":
        pytest.importorskip("gguf")
        line = f"export {model_folder} --output {tmp_path}/out.gguf --adapter {adapter} --format gguf --dtype float32"
        assert "float32, read back; log-probs change by" in cli(line).out
        lm = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32).eval()
        torch.testing.assert_close(module_logprobs(lm, PROBE), expected, atol=1e-3, rtol=0)
        return
    cli(f"export {model_folder} --output {tmp_path}/out --adapter {adapter}")
    torch.testing.assert_close(logprobs(tmp_path / "out"), expected, atol=1e-4, rtol=0)
    assert not [*(tmp_path / "out").glob("adapter*")]


def test_an_adapter_with_more_rows_brings_its_tokenizer(model_folder: Path, tmp_path: Path, cli: CommandLine) -> None:
    """peft stores the embeddings of a vocabulary that was resized."""
    lm = tiny_model()
    lm.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    random_adapter(lm, tmp_path / "adapter", 1, ["q_proj"])
    wrapped = get_peft_model(lm, LoraConfig(r=4, target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    expected = module_logprobs(wrapped.eval(), PROBE)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    cli(f"export {model_folder} --output {tmp_path}/out --adapter {tmp_path}/adapter")
    torch.testing.assert_close(logprobs(tmp_path / "out"), expected, atol=1e-4, rtol=0)
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).token_to_id("<new>") == VOCABULARY


def test_another_model_is_not_exported(
    model_folder: Path, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the writer is found without --check."""
    monkeypatch.setattr(export, "_converted", lambda name, weight, dtype: weight * 1.5)
    assert "must have the logits of its source" in cli.refused(f"export {model_folder} --output {tmp_path}/out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_initialized_from_the_base_is_merged_if_the_decomposition_is_exact(
    model_folder: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """PiSSA with an exact SVD can be repeated; with a randomized SVD, the merged model had wrong weights."""
    for start in ("pissa", "pissa_niter_4"):
        adapted = get_peft_model(tiny_model(), LoraConfig(r=2, init_lora_weights=start, target_modules=["q_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        expected = module_logprobs(adapted.eval(), PROBE)
        adapted.save_pretrained(tmp_path / start)
        line = f"export {model_folder} --output {tmp_path}/out --adapter {tmp_path}/{start}"
        if start == "pissa":
            cli(line)
            torch.testing.assert_close(logprobs(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
            shutil.rmtree(tmp_path / "out")
        else:
            assert "a random decomposition by pissa_niter_4: save it again with path_initial" in cli.refused(line)


def test_a_reward_model_keeps_its_head(paths: dict[str, str], tmp_path: Path, cli: CommandLine) -> None:
    cli(f"export {paths['reward']} --output {tmp_path}/out --dtype float32")
    heads = [AutoModelForSequenceClassification.from_pretrained(x).score for x in (paths["reward"], tmp_path / "out")]
    torch.testing.assert_close(heads[1].weight, heads[0].weight)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("", "a model must be named"),
        ("{model}", "--output must name what to write"),
        ("{model} --output {model}", "--output must not exist"),
        ("{model} --output {out} --format gguf", "output of format gguf ends with .gguf"),
        ("{model} --output {out}.gguf", "output of format safetensors does not end with .gguf"),
        ("{model} --output {out} --dtype q8_0", "dtype q8_0 is for format gguf"),
        ("{model} --output {out} --adapter {model}", "adapter_config.json"),
        (
            "{model} --output {out} --modelfile true",
            "--modelfile: export the file, and run `ollama create`",
        ),
        ("{reward} --output {out}.gguf --format gguf", "causal LMs of the families"),
        ("{large} --output {out} --dtype float16", "weights must fit --dtype"),
        ("{model} --output {out} --adapter {adapter}", "must fit LlamaForCausalLM"),
        ("{reward} --output {out} --check", "is a reward model"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    line: str, rule: str, model_folder: Path, paths: dict[str, str], tmp_path: Path, cli: CommandLine
) -> None:
    places = {"model": model_folder, "out": tmp_path / "out", "reward": paths["reward"]}
    places |= {name: tmp_path / name for name in ("large", "adapter")}
    if "{large}" in line:
        model = tiny_model()
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
        save_tiny(tmp_path / "large", model)
    if "{adapter}" in line:
        random_adapter(tiny_model(hidden_size=64), tmp_path / "adapter", 0, ["q_proj"])
    assert rule in cli.refused(f"export {line.format(**places)}")
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


@pytest.fixture
def checked(cli: CommandLine) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """The exit code of an export with a check, and what the check has found."""

    def run(line: str) -> tuple[int, dict[str, Any]]:
        ended = cli(f"export {line} --check --json")
        return ended.code, ended.result["check"]

    return run


def test_a_check_compares_greedy_tokens_with_the_source(
    model_folder: Path, tmp_path: Path, adapter: str, checked: Callable[..., Any]
) -> None:
    """The merged model with the adapter beside the model; in bfloat16, near ties may be decided otherwise."""
    line = f"{model_folder} --output {tmp_path}"
    assert checked(f"{line}/same") == (0, {"program": "transformers", "equal": 10, "rounded": 0, "faults": []})
    code, found = checked(f"{line}/merged --adapter {adapter}")
    assert (code, found["faults"]) == (0, []) and found["equal"] + found["rounded"] == 10
    code, found = checked(f"{line}/narrow --dtype bfloat16")
    assert (code, found["faults"]) == (0, [])


def test_a_check_finds_an_export_that_answers_otherwise(
    model_folder: Path, tmp_path: Path, adapter: str, checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that was not merged, and a tokenizer with another template."""
    monkeypatch.setattr("hybrid_rlhf.models.pretrained.adapters.merge_adapter", lambda lm, folder: lm)
    code, found = checked(f"{model_folder} --output {tmp_path}/out --adapter {adapter}")
    assert code == 1 and found["faults"] and "nats)" in found["faults"][0]
    monkeypatch.undo()
    save = export._save_folder

    def saved(output: Path, *given: Any, **named: Any) -> None:
        save(output, *given, **named)
        tiny_tokenizer("{{ messages[0]['content'] }}").save_pretrained(output)

    monkeypatch.setattr(export, "_save_folder", saved)
    code, found = checked(f"{model_folder} --output {tmp_path}/other")
    assert code == 1 and len(found["faults"]) > 3


def test_a_checked_gguf_file_answers_the_same_in_llama_cpp(tmp_path: Path, checked: Callable[..., Any]) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    source = tmp_path / "source"
    tiny_model(vocab_size=VOCABULARY + 1).save_pretrained(source)
    tokenizer = tiny_tokenizer()  # llama.cpp reads no vocabulary without merges
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"]["th"] = VOCABULARY
    backend["model"]["merges"] = [["t", "h"]]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    tokenizer.save_pretrained(source)
    for dtype in ("float32", "q8_0"):
        code, found = checked(f"{source} --output {tmp_path}/{dtype}.gguf --format gguf --dtype {dtype}")
        assert (code, found["faults"], found["program"]) == (0, [], "llama.cpp")


def test_a_check_without_its_program_says_so(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr("hybrid_rlhf.cli.saved_models.export_check.find_spec", lambda name: None)
    line = f"export {model_folder} --output {tmp_path}/a.gguf --format gguf --check"
    assert "needs llama-cpp-python" in cli.refused(line)
