"""Every error of a user ends with exit code 2 and one line: the rule, the value received and the fix.

A case lists fragments of its line instead of the whole line, so that the wording can improve.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hybrid_rlhf.cli.saved_models import generate
from hybrid_rlhf.cli.train import check_ranks
from hybrid_rlhf.configs.inference import GenerateConfig
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.data.rows.formats import (
    head_index,
    read_labelled_row,
    read_preference_row,
    read_prompt_row,
    read_sft_row,
    read_stepwise_row,
)
from hybrid_rlhf.data.rows.sources import open_source
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.models.lora import add_lora
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.command_line import parse_config, user_errors
from hybrid_rlhf.runtime.world import solo_world
from tests.fuzz.cases import DATA, FILES, LINES, ROWS
from tests.support.commands import DOING
from tests.support.remedies import require_accepted
from tests.support.runs import run_python

CONFIGS: dict[str, Any] = {"sft": SFTConfig, "rl": RLConfig, "pipeline": PipelineConfig, "generate": GenerateConfig}
FORMATS: dict[str, Callable[..., Any]] = {
    "sft": read_sft_row,
    "pair": read_preference_row,
    "prompt": read_prompt_row,
    "label": read_labelled_row,
    "steps": read_stepwise_row,
    "head": lambda place, row: head_index(place, row, ["helpful", "harmless"]),
}
Change = Callable[[Path], Any]


def check_error(read: Callable[[], Any], fragments: str, folder: Path) -> str:
    """`read` fails as a command does, and its error line, which is returned, matches the fragments."""
    stderr = io.StringIO()
    gc.collect()
    gc.disable()  # a finalizer of another test that fails in a deep recursion would write to stderr
    try:
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(stderr), user_errors():
            read()
    finally:
        gc.enable()
    assert ended.value.code == 2
    check_line(stderr.getvalue(), fragments, folder)
    return stderr.getvalue()


def check_line(output: str, fragments: str, folder: Path) -> None:
    """The output is one line, `error: RULE AND VALUE: FIX`, with the fragments in this order, after what a command says
    that it does; D is the folder."""
    lines = output.replace(str(folder), "D").splitlines(keepends=True)
    line = "".join(text for text in lines if not text.startswith(DOING))
    assert line.startswith("error: ") and line.endswith("\n") and line.count("\n") == 1, line
    assert line.removeprefix("error: ").rpartition(": ")[0], f"no fix: {line}"
    position = 0
    for fragment in fragments.split(" ... "):
        found = line.find(fragment, position)
        assert found >= 0, f"{fragment!r} is missing, or in another order: {line}"
        position = found + len(fragment)


def number(case: object) -> str:
    return ""  # cases are identified by their index


def read_line(folder: Path, config: str, line: str) -> None:
    parsed = parse_config(CONFIGS[config], shlex.split(line))
    if config == "pipeline":
        check_ranks(parsed)


def read_config(folder: Path, content: str | bytes) -> None:
    write(folder / "c.yaml", content)
    parse_config(SFTConfig, ["--config", str(folder / "c.yaml")])


JSON_LINES = [("rows.jsonl", content, kind, f"D/rows.jsonl:1 ... {fragments}") for content, kind, fragments in ROWS]


def read_data(folder: Path, name: str, content: str | bytes, kind: str) -> None:
    write(folder / name, content)
    read_rows(folder / name, FORMATS[kind])


def write(file: Path, content: str | bytes) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def read_rows(source: Path | str, adapter: Callable[..., Any] = read_sft_row) -> list[Any]:
    return [adapter(place, row) for place, row in open_source(str(source))]


def loop(place: Path) -> None:
    place.symlink_to(place)


def damaged_data_set(place: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # its progress
        datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(place)
    (place / "state.json").write_text("{}")


def damaged_text(place: Path) -> None:
    """A column of text that is not UTF-8."""
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)})
    pyarrow.parquet.write_table(table, place)


def read_place(folder: Path, name: str, make: Change) -> None:
    make(folder / name)
    read_rows(folder / name)


def read_name(folder: Path, name: str) -> None:
    read_rows(name)


def parquet(columns: dict[str, Any]) -> Change:
    return lambda place: pyarrow.parquet.write_table(pyarrow.table(columns), place)


PLACES: list[tuple[str, Change, str]] = [
    ("absent.jsonl", lambda place: None, "D/absent.jsonl ... does not exist"),
    ("x\0.jsonl", lambda place: None, "D/x\\x00.jsonl ... does not exist"),
    ("pipe.jsonl", os.mkfifo, "D/pipe.jsonl ... pipe or a device"),
    ("loop.jsonl", loop, "D/loop.jsonl ... does not exist"),
    ("r.jsonl", Path.mkdir, "save_to_disk ... D/r.jsonl"),
    ("set", damaged_data_set, "save_to_disk ... D/set"),
    (
        "r.parquet",
        damaged_text,
        "D/r.parquet ... Parquet ... ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
    ),
    ("r.parquet", parquet({"text": [b"x"]}), "D/r.parquet: row 1 ... 'text' ... text ... got bytes"),
    (
        "r.parquet",
        parquet({"prompt": [1]}),
        "D/r.parquet: row 1 ... messages or prompt + completion ... got columns prompt ... rename",
    ),
]


NAMES = [
    ("/dev/zero", "/dev/zero ... pipe or a device"),
    (
        "~nosuch/r.jsonl",
        "~nosuch/r.jsonl ... (Could not determine home directory)",
    ),
    ("https://me:pass@host/r.jsonl", "got https://***@host/r.jsonl ... download"),
    ("json", " json  ... format"),
    (
        "x" * 5000 + ".jsonl",
        "x" * 300 + " ... (File name too long)",
    ),
]


def edit(name: str, **changes: Any) -> Change:
    """Other values in a JSON file; ... takes one out."""

    def change(folder: Path) -> None:
        content = {**json.loads((folder / name).read_text()), **changes}
        content = {key: value for key, value in content.items() if value is not ...}
        (folder / name).write_text(json.dumps(content))

    return change


def put(name: str, content: str | bytes) -> Change:
    return lambda folder: write(folder / name, content)


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def config(**changes: Any) -> Change:
    return edit("config.json", **changes)


def tokens(**changes: Any) -> Change:
    return edit("tokenizer_config.json", **changes)


def template(text: str | bytes) -> Change:
    return put("chat_template.jinja", text)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
HEADER = "weights must be complete safetensors files, D/m/model.safetensors is not (Error while deserializing header"
UNKNOWN = "transformers must support the model, D/m fails"
CHECK = "check the path and its config.json"
CANNOT, AGAIN = "transformers cannot load D/m as a causal_lm", "copy the model again, or choose another"
NO_TOKENIZER, BESIDE = "transformers cannot load a tokenizer from D/m", "save one beside the model"
REFUSES = "the chat template refuses the roles ['user']"
AUTO = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
MODELS = [
    (
        pickled,
        "weights must be safetensors, D/m has only pytorch_model.bin: if you trust it, convert it once with "
        "from_pretrained(FOLDER) and save_pretrained(NEW_FOLDER) of transformers",
    ),
    (
        lambda m: (m / WEIGHTS).unlink(),
        "a model folder must have a model.safetensors, D/m has no weights: copy the model again",
    ),
    (cut(WEIGHTS, 30_000), f"{HEADER}: incomplete metadata, file not fully covered): copy it again"),
    (put(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), f"{HEADER}: header too large): copy it again"),
    (put(INDEX, "{}"), f"{INDEX} must map weights to files beside it, D/m/{INDEX} does not: copy the model again"),
    (
        put(INDEX, '{"weight_map": {"a": "../x"}}'),
        f"{INDEX} must map weights to files beside it, D/m/{INDEX} does not: copy the model again",
    ),
    (put(INDEX, '{"weight_map": {"a": "x"}}'), f"all files in {INDEX} must exist, D/m has no x: copy the model again"),
    (
        lambda m: (m / "config.json").unlink(),
        "a model folder must have a config.json, D/m has none: give a folder that save_pretrained wrote",
    ),
    (
        put("config.json", "{"),
        "config.json ... JSON ... D/m/config.json:1 ... (Expecting property name enclosed in double quotes)",
    ),
    (put("config.json", "[]"), "config.json ... JSON ... object ... D/m/config.json"),
    (
        put("config.json", '{"model_type": "llama", "model_type": "gpt2"}'),
        "config.json ... JSON ... D/m/config.json:1 ... 'model_type'",
    ),
    (
        put("config.json", "{}"),
        "D/m ... (Unrecognized model in D/m. Should have a `model_type` key in its config.json.) ... config.json",
    ),
    (
        config(model_type="nope"),
        "D/m ... model type `nope` but Transformers does not recognize this architecture ... config.json",
    ),
    (config(model_type=["llama"]), "D/m ... (unhashable type: 'list') ... config.json"),
    (
        config(model_type="nope", auto_map=AUTO),
        f"{UNKNOWN} (it needs its own Python code, which is not run by default): set trust_remote_code to true if you "
        "trust its authors",
    ),
    (config(num_attention_heads=0), "D/m ... (integer modulo by zero) ... config.json"),
    (
        config(num_hidden_layers=10**9),
        "num_hidden_layers must be at most 10,000, D/m has 1000000000: correct config.json",
    ),
    (config(hidden_size=64), f"{CANNOT} (its weights have other shapes than in its config.json): {AGAIN}"),
    (
        config(num_hidden_layers=3),
        "D/m ... 9 weights ... model.layers ... input_layernorm.weight ... copy",
    ),
    (
        config(num_hidden_layers=1),
        "config.json of D/m has 1 layers, its weights have more (model.layers.1.input_layernorm.weight): correct it",
    ),
    (config(hidden_act="nope"), f"{CANNOT} (it does not know hidden_act 'nope'): correct hidden_act in config.json"),
    (
        config(quantization_config={"bits": 4}),
        "quantization_config must name a quant_method, that of D/m has none: remove it from config.json if the weights "
        "are unquantised, or copy the model again",
    ),
    (
        config(vocab_size=100),
        "the embedding of D/m has 100 tokens, its tokenizer has 'Ń' with id 258: save the tokenizer of this model "
        "beside it, or call resize_token_embeddings",
    ),
    (
        tokens(eos_token="<stop>"),
        "the embedding of D/m has 259 tokens, its tokenizer has '<stop>' with id 259: save the tokenizer of this model "
        "beside it, or call resize_token_embeddings",
    ),
    (
        tokens(eos_token=None),
        "a tokenizer must have an EOS token, D/m has none: set tokenizer.eos_token and save it beside the model",
    ),
    (put("tokenizer.json", "{}"), "D/m ... ('added_tokens')"),
    (
        put("tokenizer_config.json", "{"),
        "D/m ... (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
    ),
    (
        tokens(model_max_length="x"),
        "D/m ... ('>' not supported between instances of 'int' and 'str')",
    ),
    (
        tokens(tokenizer_class="Nope", auto_map={"AutoTokenizer": ["code.T", None]}),
        f"{NO_TOKENIZER} (it needs its own Python code, which is not run by default): set trust_remote_code to true if "
        "you trust its authors",
    ),
    (
        template("{% for %}"),
        "line 1 ... (Expected an expression, got 'end of statement block') ... data.chat_template",
    ),
    (template("{{ raise_exception('no\nuser') }}"), "['user'] ... (no user) ... data.chat_template"),
    (
        template("{% for i in range(10 ** 9) %}x{% endfor %}"),
        "['user'] ... (Range too big. The sandbox blocks ranges larger than MAX_RANGE ... data.chat_template",
    ),
    (
        template("{{ ''.__class__.__mro__ }}"),
        "['user'] ... (access to attribute '__class__' of 'str' object is unsafe.) ... data.chat_template",
    ),
    (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "['user'] ... (maximum recursion depth exceeded) ... data.chat_template",
    ),
    (
        put(GENERATION, "[]"),
        "generation_config.json ... JSON ... object ... D/m/generation_config.json",
    ),
    (
        put(GENERATION, '{"eos_token_id": "x"}'),
        f"eos_token_id must be a number or a list of numbers, D/m/{GENERATION} has 'x': correct it",
    ),
]


def load(path: Path | str, lora: LoraConfig | None = None) -> None:
    """Load a model as a step does before training."""
    resolved = resolve_model(str(path), world=solo_world(torch.device("cpu")))
    encode_prompt([{"role": "user", "content": "q"}], load_tokenizer(resolved))
    model, _ = load_model(resolved, "causal_lm", config=ModelConfig(), dtype=torch.float32)
    if lora is not None:
        add_lora(model, lora, "causal_lm", seed=0)


@pytest.mark.parametrize(("change", "expected"), MODELS, ids=number)
def test_a_model_folder(change: Change, expected: str, model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "m")
    change(tmp_path / "m")
    check_error(lambda: load(tmp_path / "m"), expected, tmp_path)


MODEL_NAMES = [
    ("/absent/m", "a model must be a folder, a .gguf file or a hub name, /absent/m is none: check the path"),
    ("a b", "a model must be a folder, a .gguf file or a hub name, a b is none: check the path"),
    ("/dev/null", "a model must be a folder, a .gguf file or a hub name, /dev/null is none: check the path"),
    ("~nosuch/m", "a model must be a folder, a .gguf file or a hub name, ~nosuch/m is none: check the path"),
    (
        "https://me:pass@h/m",
        "a model must be a folder, a .gguf file or a hub name, got https://***@h/m: download it first",
    ),
    ("absent.gguf", "a model file must exist, absent.gguf does not exist: check the path"),
]


def load_name(folder: Path, name: str) -> None:
    load(name)


MODULES = [
    (["nothing"], "no module of LlamaForCausalLM is named nothing"),
    (
        [],
        "No `target_modules` passed but also no `target_parameters` found. Please check the values for these "
        "arguments.",
    ),
    ("(", "missing ), unterminated subpattern at position 0"),
]


@pytest.mark.parametrize(("modules", "reason"), MODULES, ids=number)
def test_modules_for_adapters(modules: str | list[str], reason: str, model_folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=modules)
    expected = f"lora.target_modules {modules} ... ({reason})"
    check_error(lambda: load(model_folder, lora), expected, tmp_path)


JSONS = [
    (None, "deepspeed_config ... JSON ... D/ds.json ... does not exist"),
    ("", "deepspeed_config ... JSON ... D/ds.json:1 ... (Expecting value)"),
    (
        "{,}",
        "deepspeed_config ... JSON ... D/ds.json:1 ... (Expecting property name enclosed in double quotes)",
    ),
    ("[1]", "deepspeed_config ... JSON ... object ... D/ds.json"),
    (
        "{" * 100_000,
        "deepspeed_config ... JSON ... D/ds.json:1 ... (Expecting property name enclosed in double quotes)",
    ),
    ('{"a":' * 100_000, "deepspeed_config ... JSON ... D/ds.json:1 ... nested"),
    (b"\xff\xfe{", "D/ds.json ... UTF-16 ... UTF-8"),
]


def read_json(folder: Path, content: str | bytes | None) -> None:
    if content is not None:
        write(folder / "ds.json", content)
    read_overrides(str(folder / "ds.json"))


HOSTS = [
    ("", "launcher.hostfile ... D/hosts ... `HOST slots=N`"),
    ("a slots=8\nb\n", "D/hosts:2 ... `HOST slots=N` ... got 'b'"),
    ("a slots=0\n", "D/hosts:1 ... `HOST slots=N` ... got 'a slots=0'"),
    ("a slots=1\na slots=1\n", "D/hosts:2 ... once ... 'a slots=1'"),
]


def read_hosts(folder: Path, content: str) -> None:
    write(folder / "hosts", content)
    read_line(folder, "pipeline", f"--launcher.hostfile {folder}/hosts")


CASES = [
    (read, *case)
    for read, cases in (
        (read_line, [(config, *case) for config, cases in LINES.items() for case in cases]),
        (read_config, FILES),
        (read_data, [*JSON_LINES, *DATA]),
        (read_place, PLACES),
        (read_name, NAMES),
        (load_name, MODEL_NAMES),
        (read_json, JSONS),
        (read_hosts, HOSTS),
    )
    for case in cases
]
"""A function of a folder and inputs, the inputs, the fragments of the line."""


@pytest.mark.parametrize("case", CASES, ids=number)
def test_an_error_is_a_line(case: tuple[Any, ...], tmp_path: Path) -> None:
    read, *inputs, expected = case
    line = check_error(lambda: read(tmp_path, *inputs), expected, tmp_path)
    if read is read_line:
        require_accepted(line, [CONFIGS[inputs[0]]])


COMMANDS = [
    ("train.py --steps sft --setps x".split(), "--setps ... nearest is steps"),
    (
        ["training/step3_ppo/main.py", "--reward.components", "[{urls: ['http://me:pass@h/'], timeout: 1}]"],
        "reward.components ... timeout ... nearest is timeout_seconds",
    ),
]


@pytest.mark.parametrize(("line", "expected"), COMMANDS, ids=number)
def test_a_command(line: list[str], expected: str, tmp_path: Path) -> None:
    done = run_python(line)
    assert done.returncode == 2 and done.stdout == ""
    check_line(done.stderr, expected, tmp_path)


def test_an_output_that_is_a_folder(tmp_path: Path) -> None:
    line = [str(tmp_path / "m"), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path)]
    expected = "--output must be a file that can be written, got D: choose another"
    check_error(lambda: generate.main(line), expected, tmp_path)
