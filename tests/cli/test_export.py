"""`hybrid-rlhf export`: the folder or file that it writes is the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rlhf.cli.main import main
from hybrid_rlhf.cli.saved_models import export
from hybrid_rlhf.models.head_check import module_logprobs
from tests.support.commands import refusal
from tests.support.models import random_adapter
from tests.support.tiny import VOCABULARY, tiny_config, tiny_model, tiny_tokenizer

PROBE = list(range(3, 40))
VLLM = """
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, model, dtype, **_):
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts, params, use_tqdm):
        return [self.one(torch.tensor([prompt["prompt_token_ids"]]), params) for prompt in prompts]

    def one(self, ids, params):
        whole = self.lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=params.stop_token_ids,
            pad_token_id=0,
        )
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=whole[0, ids.shape[1] :].tolist())])
"""
"""A package with vLLM's calls, which transformers answers."""


def logprobs(folder: Path) -> torch.Tensor:
    """Of a folder, by Hugging Face."""
    return module_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), PROBE)


def test_the_home_of_nobody_is_a_folder(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export.main([str(model_folder), "--output", "~nosuch/out"])
    assert (tmp_path / "~nosuch" / "out" / "config.json").is_file()


def test_dtype_shards_and_card(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    (source / "README.md").write_text("# Mine\n")
    output = tmp_path / "out"
    export.main([str(source), "--output", str(output), "--dtype", "bfloat16", "--shard_gib", "0.00001"])
    assert len(list(output.glob("model-*.safetensors"))) > 1
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    weights = {name: value for file in output.glob("*.safetensors") for name, value in load_file(file).items()}
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    torch.testing.assert_close(logprobs(output), logprobs(model_folder), atol=0.1, rtol=0.1)
    assert (output / "README.md").read_text() == "# Mine\n" and (output / "tokenizer.json").is_file()
    assert f"{output}: bfloat16, " in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_an_adapter_is_merged(model_folder: Path, tmp_path: Path) -> None:
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    expected = module_logprobs(model.eval(), PROBE)
    model.save_pretrained(tmp_path / "adapter")
    line = [str(model_folder), "--output", str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]
    export.main(line)
    torch.testing.assert_close(logprobs(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    assert (expected - logprobs(model_folder)).abs().max() > 0.1
    assert not list((tmp_path / "out").glob("adapter*"))


def test_a_gguf_file_is_written_and_measured(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    output = tmp_path / "model.gguf"
    export.main([str(model_folder), "--output", str(output), "--format", "gguf", "--dtype", "q8_0"])
    assert output.is_file() and "q8_0, read back; log-probs change by" in capsys.readouterr().out


def test_a_reward_model_keeps_its_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    scorer.save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    export.main([str(tmp_path / "reward"), "--output", str(tmp_path / "out"), "--dtype", "float32"])
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(read.score.weight, scorer.score.weight)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "a model must be named"),
        (["MODEL"], "--output must name what to write"),
        (["MODEL", "--output", "MODEL"], "--output must not exist"),
        (["MODEL", "--output", "OUT", "--format", "gguf"], "output of format gguf ends with .gguf"),
        (["MODEL", "--output", "OUT.gguf"], "output of format safetensors does not end with .gguf"),
        (["MODEL", "--output", "OUT", "--dtype", "q8_0"], "dtype q8_0 is for format gguf"),
        (["MODEL", "--output", "OUT", "--adapter", "MODEL"], "adapter_config.json"),
        (["REWARD", "--output", "OUT.gguf", "--format", "gguf"], "causal LMs of the families"),
        (["LARGE", "--output", "OUT", "--dtype", "float16"], "weights must fit --dtype"),
        (["MODEL", "--output", "OUT", "--adapter", "ADAPTER"], "must fit LlamaForCausalLM"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], rule: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": model_folder, "OUT": tmp_path / "out", "OUT.gguf": tmp_path / "out.gguf"}
    places |= {name: tmp_path / name.lower() for name in ("REWARD", "LARGE", "ADAPTER")}
    if "REWARD" in words:
        AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(places["REWARD"])
    if "LARGE" in words:
        model = tiny_model()
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
        model.save_pretrained(places["LARGE"])
    if "ADAPTER" in words:
        other = get_peft_model(tiny_model(hidden_size=64), LoraConfig(r=4, target_modules=["q_proj"]))
        other.save_pretrained(places["ADAPTER"])
    for name in ("REWARD", "LARGE"):
        if name in words:
            tiny_tokenizer().save_pretrained(places[name])
    assert rule in refusal(export.main, [places.get(word, word) for word in words], capsys)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def exported(line: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code of an export with a check, and what the check has found."""
    capsys.readouterr()
    code = 0
    try:
        main(["export", *line, "--check", "--json"])
    except SystemExit as stopped:
        code = int(str(stopped.code))
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])["check"]


def test_a_check_compares_greedy_tokens_with_the_source(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged model with the adapter beside the model; in bfloat16, near ties may be decided otherwise."""
    adapter = random_adapter(tiny_model(), tmp_path / "adapter", 0, ["q_proj", "down_proj"])
    line = [str(model_folder), "--output"]
    assert exported([*line, str(tmp_path / "same")], capsys) == (
        0,
        {"program": "transformers", "equal": 10, "rounded": 0, "faults": []},
    )
    code, found = exported([*line, str(tmp_path / "merged"), "--adapter", adapter], capsys)
    assert (code, found["faults"]) == (0, []) and found["equal"] + found["rounded"] == 10
    code, found = exported([*line, str(tmp_path / "narrow"), "--dtype", "bfloat16"], capsys)
    assert (code, found["faults"]) == (0, [])


def test_a_check_finds_an_export_that_answers_otherwise(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that was not merged, and a tokenizer with another template."""
    adapter = random_adapter(tiny_model(), tmp_path / "adapter", 0, ["q_proj", "down_proj"])
    monkeypatch.setattr("hybrid_rlhf.models.pretrained.adapters.merge_adapter", lambda lm, folder: lm)
    line = [str(model_folder), "--output", str(tmp_path / "out")]
    code, found = exported([*line, "--adapter", adapter], capsys)
    assert code == 1 and found["faults"] and "nats)" in found["faults"][0]
    monkeypatch.undo()
    monkeypatch.setattr(export, "_save_folder", _with_other_template(export._save_folder))
    line[-1] = str(tmp_path / "other")
    code, found = exported(line, capsys)
    assert code == 1 and len(found["faults"]) > 3


def _with_other_template(save: Any) -> Any:
    def saved(output: Path, *given: Any, **named: Any) -> None:
        save(output, *given, **named)
        tiny_tokenizer("{{ messages[0]['content'] }}").save_pretrained(output)

    return saved


def test_a_checked_gguf_file_answers_the_same_in_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        line = [str(source), "--output", str(tmp_path / f"{dtype}.gguf"), "--format", "gguf", "--dtype", dtype]
        code, found = exported(line, capsys)
        assert (code, found["faults"], found["program"]) == (0, [], "llama.cpp")


@pytest.mark.slow
def test_a_check_in_vllm_compares_the_tokens_that_its_interpreter_prints(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without vLLM: a package of its name answers with transformers, and one that fails is named."""
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = ["export", str(model_folder), "--check_vllm", str(python), "--json", "--output"]
    main([*line, str(tmp_path / "same")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["check_vllm"] == {"program": "vLLM", "equal": 10, "rounded": 0, "faults": []}
    assert "check" not in result
    (package / "__init__.py").write_text(VLLM.replace(".tolist()", ".add(1).tolist()"))
    with pytest.raises(SystemExit, match="1"):
        main([*line, str(tmp_path / "other")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["check_vllm"]["faults"]
    (package / "__init__.py").write_text("raise RuntimeError('no kernels for this machine')")
    refused = refusal(export.main, [*line[1:4], "--output", str(tmp_path / "refused")], capsys)
    assert "vLLM must load" in refused and "no kernels for this machine" in refused
    refused = refusal(
        export.main, [str(model_folder), "--output", str(tmp_path / "x"), "--check_vllm", "/none"], capsys
    )
    assert "--check_vllm must be the interpreter of an environment with vLLM, got /none" in refused
    refused = refusal(
        export.main,
        [str(model_folder), "--output", str(tmp_path / "x.gguf"), "--format", "gguf", "--check_vllm", "p"],
        capsys,
    )
    assert "check_vllm is for format safetensors" in refused


def test_a_check_that_is_not_possible_says_so(
    model_folder: Path,
    paths: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hybrid_rlhf.cli.saved_models.export_check.find_spec", lambda name: None)
    line = [str(model_folder), "--output", str(tmp_path / "a.gguf"), "--format", "gguf", "--check"]
    assert "needs llama-cpp-python" in refusal(export.main, line, capsys)
    tiny_tokenizer().save_pretrained(paths["reward"])
    line = [paths["reward"], "--output", str(tmp_path / "out"), "--check"]
    assert "is a reward model" in refusal(export.main, line, capsys)
