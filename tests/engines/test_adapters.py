"""Adapters that train together: each learns what it learns alone, in peft and in this engine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import AdamStep
from hybrid_rlhf.engines.adapters import AdapterEngine, AdapterRow, RowResult
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.packing import use_packing
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.devices import DEVICES, needs_gpu
from tests.support.errors import user_error
from tests.support.models import build_model, checkpointed, random_adapter
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model

TENANTS = {
    "narrow": (LoraConfig(rank=1, alpha=4, target_modules=["q_proj"]), AdamStep(lr=1e-3, weight_decay=0.1)),
    "wide": (LoraConfig(rank=12, alpha=6), AdamStep(lr=3e-4, betas=(0.8, 0.99), max_grad_norm=0.05)),
    "mlp": (LoraConfig(rank=4, alpha=8, target_modules=["gate_proj", "down_proj"]), AdamStep(lr=2e-3, eps=1e-6)),
}
LENGTHS = {"narrow": [3, 90, 11], "wide": [40, 1], "mlp": [12, 12, 30, 7]}
NAMES = [*TENANTS]
STEPS = 4
ROUNDED = 5e-6
"""Adam divides a gradient by its size. Of the 1,300 weights of an adapter the smallest gradient is about 1/1,300 of the
others: eight units of float32 in these are 6e-4 of it, and of the 8e-3 that four updates move a weight."""


def engine_of(lm: PreTrainedModel, world: World | None = None, *, device: str = "cpu", **options: Any) -> AdapterEngine:
    use_packing(lm.to(device))  # type: ignore[arg-type]
    return AdapterEngine(lm, world=world or solo_world(torch.device(device)), **options)


def rows_of(name: str, step: int = 0) -> list[AdapterRow]:
    """Rows of an adapter, with losses of two kinds, one mask and two temperatures."""
    generator = torch.Generator().manual_seed(100 * sorted(TENANTS).index(name) + step)
    rows = []
    for number, length in enumerate(LENGTHS[name]):
        ids = torch.randint(3, 200, (2, length), generator=generator)
        mask = torch.arange(length) % 2 == 0 if number == 1 else None
        rows.append(
            AdapterRow(name, ids[0], ids[1], square if number % 2 else surprise, mask, 0.7 if number == 2 else 1.0)
        )
    return rows


def all_rows(step: int = 0, names: Sequence[str] = NAMES) -> list[AdapterRow]:
    return [row for name in names for row in rows_of(name, step)]


def surprise(logprobs: Tensor) -> Tensor:
    return -logprobs.sum() / 50


def square(logprobs: Tensor) -> Tensor:
    return (logprobs / 10).square().sum()


def train(engine: AdapterEngine, names: Sequence[str] = NAMES, steps: range = range(STEPS)) -> list[list[RowResult]]:
    """The results of each step."""
    history = []
    for step in steps:
        history.append(engine.forward_backward(all_rows(step, names)))
        for name in names:
            engine.step(name, TENANTS[name][1])
    return history


def engine_with(names: Sequence[str] = NAMES, **options: Any) -> AdapterEngine:
    """An engine of the tiny model with fresh adapters."""
    engine = engine_of(tiny_model(), **options)
    for name in names:
        engine.add(name, TENANTS[name][0], seed=7)
    return engine


def weights(engine: AdapterEngine, name: str, folder: Path) -> dict[str, Tensor]:
    engine.save(name, folder / name)
    return load_file(folder / name / "adapter_model.safetensors")


def trained(folder: Path, names: Sequence[str] = NAMES, **options: Any) -> dict[str, Any]:
    """Weights of some adapters that train together, and the results of the last step."""
    engine = engine_with(names, **options)
    history = train(engine, names)
    folder.mkdir(exist_ok=True)
    return {name: weights(engine, name, folder) for name in names} | {"results": history[-1]}


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def apart(engine: AdapterEngine, wanted: dict[str, Any], folder: Path, names: Sequence[str] = NAMES) -> float:
    """Largest difference of the adapters' weights from those of `trained`."""
    return max(difference(weights(engine, name, folder), wanted[name]) for name in names)


def train_in_peft(lm: PreTrainedModel, folder: Path, name: str) -> dict[str, Tensor]:
    """The weights of an adapter that starts from a folder and trains in peft with torch's optimizer."""
    model = PeftModel.from_pretrained(lm, folder, is_trainable=True)
    adam = TENANTS[name][1]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
    )
    for step in range(STEPS):
        total = torch.zeros(())
        for row in rows_of(name, step):
            logits = model(row.tokens[None]).logits[0] / row.temperature
            logprobs = logits.log_softmax(-1).gather(1, row.targets[:, None])[:, 0]
            assert row.loss is not None
            total = total + row.loss(logprobs if row.mask is None else torch.where(row.mask, logprobs, 0.0))
        optimizer.zero_grad()
        total.backward()
        if adam.max_grad_norm:
            assert float(torch.nn.utils.clip_grad_norm_(parameters, adam.max_grad_norm)) > adam.max_grad_norm
        optimizer.step()
    model.save_pretrained(folder / "peft")
    return load_file(folder / "peft" / "adapter_model.safetensors")


def test_each_adapter_learns_what_it_learns_alone_in_peft(tmp_path: Path) -> None:
    """Beside adapters with other ranks, layers, rates and losses; in one step of the engine their attention is in
    several groups."""
    engine = engine_with(micro_batch_tokens=100)
    before = {name: weights(engine, name, tmp_path) for name in TENANTS}
    train(engine)
    for name in TENANTS:
        wanted = train_in_peft(tiny_model(), tmp_path / name, name)
        assert difference(before[name], wanted) > 2e-4, "it learns"
        assert difference(weights(engine, name, tmp_path), wanted) < ROUNDED


def test_neighbours_change_not_a_bit_if_deterministic(tmp_path: Path) -> None:
    together = trained(tmp_path, deterministic=True)
    for name in TENANTS:
        alone = trained(tmp_path, [name], deterministic=True)
        assert difference(together[name], alone[name]) == 0.0
        adapters = [row.adapter for row in all_rows()]
        places = [place for place, adapter in enumerate(adapters) if adapter == name]
        for place, wanted in zip(places, alone["results"], strict=True):
            exact = together["results"][place]
            assert torch.equal(exact.logprobs, wanted.logprobs) and exact.loss == wanted.loss


def on_ranks(world: World, folder: Path) -> list[dict[str, Any]]:
    """All adapters, all deterministically, and one of them alone."""
    exact = {"world": world, "deterministic": True}
    return [trained(folder, world=world), trained(folder, **exact), trained(folder, ["wide"], **exact)]


def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    one = trained(tmp_path)
    (*both, alone), (*others, _) = run_ranks(on_ranks, 2, tmp_path / "both", tmp_path)
    for first, second in zip(both, others, strict=True):
        for name in NAMES:
            assert difference(first[name], one[name]) < ROUNDED
        for mine, theirs, wanted in zip(first["results"], second["results"], one["results"], strict=True):
            assert torch.equal(mine.logprobs, theirs.logprobs) and mine.loss == theirs.loss
            torch.testing.assert_close(mine.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
    assert difference(alone["wide"], both[1]["wide"]) == 0.0


@pytest.mark.parametrize(
    ("family", "extra"),
    [("gpt2", {"n_positions": 96}), ("gemma2", {}), ("qwen3", {"intermediate_size": 46}), ("phi3", {})],
)
def test_families_with_other_layers_learn_as_in_peft(family: str, extra: dict[str, int], tmp_path: Path) -> None:
    """Weights stored [in, out], soft caps, norms of queries, fused products, sizes that grouped products pad;
    activations are recomputed."""
    lm = build_model(family, **extra)
    checkpointed(lm)
    engine = engine_of(lm)
    for name, rank in (("narrow", 3), ("mlp", 9)):
        engine.add(name, LoraConfig(rank=rank, alpha=8), seed=rank)
        engine.save(name, tmp_path / name)
    train(engine, ["narrow", "mlp"])
    for name in ("narrow", "mlp"):
        wanted = train_in_peft(build_model(family, **extra), tmp_path / name, name)
        engine.save(name, tmp_path / "now")
        assert difference(load_file(tmp_path / "now" / "adapter_model.safetensors"), wanted) < ROUNDED


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed before the new one was in its place."""
    engine = engine_with(["wide"])
    engine.save("wide", tmp_path / "a")
    saved = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == ".a.partial":
            raise OSError("no space left")
        return rename(path, target)

    train(engine, ["wide"], range(1))
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no space left"):
        engine.save("wide", tmp_path / "a")
    monkeypatch.undo()
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == saved
    engine.save("wide", tmp_path / "a")
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() != saved
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing else is left"


def test_a_diverged_neighbour_reaches_no_other_adapter(tmp_path: Path) -> None:
    """Its values that are not finite are in the same products, forward and backward; its own update is skipped."""
    engine = engine_with()
    engine.save("wide", tmp_path / "nan")
    file = tmp_path / "nan" / "adapter_model.safetensors"
    save_file({name: torch.full_like(x, float("nan")) for name, x in load_file(file).items()}, file)
    engine.load("wide", tmp_path / "nan")
    for step in range(STEPS):
        results = engine.forward_backward(all_rows(step))
        assert sum(bool(result.logprobs.isnan().any()) for result in results) == len(LENGTHS["wide"])
        skipped = {name: engine.step(name, TENANTS[name][1])["skipped"] for name in TENANTS}
        assert skipped == {"narrow": 0.0, "wide": 1.0, "mlp": 0.0}
    assert engine.steps("wide") == 0
    others = ["narrow", "mlp"]
    assert apart(engine, trained(tmp_path, others), tmp_path, others) < ROUNDED


@pytest.mark.parametrize(
    ("how", "after"), [("saved", 0), ("saved", 2), ("parked on disk", 2), ("parked on the host", 2)]
)
def test_an_adapter_comes_back_bit_for_bit(how: str, after: int, tmp_path: Path) -> None:
    """With its optimizer, whose averages exist after the first step, and if it is parked with a gradient that waits
    for its step."""
    wanted = trained(tmp_path)
    engine = engine_with(park_folder=tmp_path / "park" if how == "parked on disk" else None)
    train(engine, NAMES, range(after))
    if how == "saved":
        engine.save("wide", tmp_path / "saved", with_optimizer=True)
        assert bool(load_file(tmp_path / "saved" / "optimizer.safetensors")) == (after > 0)
        engine.remove("wide")
        engine.load("wide", tmp_path / "saved", with_optimizer=True)
    else:
        engine.park("wide")
        assert engine.parked == ("wide",)
    engine.forward_backward(all_rows(after))
    if how != "saved":
        assert engine.parked == ()
        engine.park("wide")
    for name in NAMES:
        engine.step(name, TENANTS[name][1])
    train(engine, NAMES, range(after + 1, STEPS))
    assert engine.steps("wide") == STEPS
    assert apart(engine, wanted, tmp_path) == 0.0
    assert not list((tmp_path / "park").rglob("*.safetensors")), "parked files go when their adapters are back"


def tensor_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if torch.is_tensor(x)
    }
    return sum(storages.values())


def test_an_adapter_costs_its_weights_and_optimizer_and_idle_ones_are_on_disk(tmp_path: Path) -> None:
    lora = LoraConfig(rank=8)
    engine = engine_of(tiny_model(), park_folder=tmp_path, max_resident=2)
    engine.add("first", lora, seed=0)
    start = tensor_bytes()
    engine.add("second", lora, seed=1)
    size = tensor_bytes() - start
    per_layer = sum(layer.in_features + layer.out_features for layer in layers_of(engine.lm))
    assert size == 4 * 8 * per_layer
    engine.forward_backward([AdapterRow("second", torch.tensor([5, 6]), torch.tensor([6, 7]), surprise)])
    with_gradient = tensor_bytes()
    engine.step("second", AdamStep())
    assert tensor_bytes() == with_gradient + size, "two averages come, the gradient goes"
    before = tensor_bytes()
    for number in range(64):
        engine.add(f"idle/{number}", lora, seed=number)
    assert len(engine.parked) == 64 and len(engine.names) == 66
    assert tensor_bytes() <= before
    assert len(list(tmp_path.rglob("*.safetensors"))) == 64
    engine.remove("idle/3")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 63


def layers_of(lm: PreTrainedModel) -> list[torch.nn.Linear]:
    head = lm.get_output_embeddings()
    return [module for module in lm.modules() if isinstance(module, torch.nn.Linear) and module is not head]


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_peft_can_be_trained_on(use_rslora: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = PeftConfig(r=6, lora_alpha=9, target_modules=["v_proj", "up_proj"], use_rslora=use_rslora)
    theirs = get_peft_model(tiny_model(), config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    engine = engine_of(tiny_model())
    engine.load("mlp", tmp_path / "theirs")
    train(engine, ["mlp"])
    wanted = train_in_peft(tiny_model(), tmp_path / "theirs", "mlp")
    assert difference(weights(engine, "mlp", tmp_path), wanted) < ROUNDED


def test_rows_without_a_loss_leave_no_gradient(tmp_path: Path) -> None:
    engine = engine_with(["narrow", "mlp"])
    silent = [AdapterRow("narrow", row.tokens, row.targets) for row in rows_of("narrow")]
    assert all(result.loss is None for result in engine.forward_backward(silent))
    results = engine.forward_backward([*silent, *rows_of("mlp")])
    assert engine.step("narrow", AdamStep())["grad_norm"] == 0.0
    assert engine.step("mlp", AdamStep())["grad_norm"] > 0.0
    engine.forward_backward(rows_of("mlp"))
    engine.zero_gradient("mlp")
    assert engine.step("mlp", AdamStep())["grad_norm"] == 0.0
    assert results[0].logprobs.shape == (3,)
    assert engine.forward_backward([]) == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_exception_leaves_every_gradient_as_it_was(deterministic: bool, tmp_path: Path) -> None:
    """Also where an earlier micro-batch, or adapter, had its backward pass."""
    engine = engine_with(micro_batch_tokens=40, deterministic=deterministic)
    rows = all_rows()
    for number in range(len(rows)):
        broken = [replace(row, loss=fails) if place == number else row for place, row in enumerate(rows)]
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(broken)
    train(engine)
    assert apart(engine, trained(tmp_path, micro_batch_tokens=40, deterministic=deterministic), tmp_path) == 0.0


def fails(logprobs: Tensor) -> Tensor:
    raise ZeroDivisionError


def fails_on_a_rank(world: World, folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The exception of a loss that only one rank calls, and what is learned afterwards."""
    engine = engine_with(["mlp"], world=world)
    rows = rows_of("mlp")
    try:
        engine.forward_backward([replace(rows[0], loss=fails), *rows[1:]])
    except (ZeroDivisionError, RuntimeError) as error:
        text = repr(error)
    train(engine, ["mlp"])
    return text, weights(engine, "mlp", folder)


def test_an_exception_on_a_rank_is_one_on_all(tmp_path: Path) -> None:
    """The others would wait for its results."""
    (first, after), (second, _) = run_ranks(fails_on_a_rank, 2, tmp_path / "ranks", tmp_path)
    assert {first[:10], second[:10]} == {"ZeroDivisi", "RuntimeErr"}
    assert difference(after, trained(tmp_path, ["mlp"])["mlp"]) < ROUNDED


def test_an_adapter_that_cannot_be_parked_stays(tmp_path: Path) -> None:
    (tmp_path / "park").write_text("a file, where a folder should be")
    engine = engine_with(["mlp"], park_folder=tmp_path / "park")
    before = weights(engine, "mlp", tmp_path)
    with pytest.raises(OSError):
        engine.park("mlp")
    assert engine.parked == ()
    assert difference(weights(engine, "mlp", tmp_path), before) == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sampling_has_the_current_weights_of_each_adapter(family: str, device: str) -> None:
    """Handed over in memory, by name and version, while the base is not loaded again; an older version stays."""
    engine = engine_of(build_model(family), device=device)
    generation = GenerationEngine.from_model(engine.lm, stop_token_ids=[])
    names = ["narrow", "mlp"]
    for name in names:
        engine.add(name, LoraConfig(rank=4, alpha=400), seed=1)
        generation.set_adapter(f"{name}/0", engine.factors(name))
    prompt = [7, 8, 9, 30]
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    (base,), *before = generation.generate([prompt] * 3, greedy, adapters=[None, *(f"{name}/0" for name in names)])
    assert [one.token_ids for (one,) in before] == [base.token_ids] * 2, "fresh adapters change nothing"
    for step in range(2):
        engine.forward_backward([short(row) for name in names for row in rows_of(name, step)])
        for name in names:
            engine.step(name, AdamStep(lr=0.01))
    for name in names:
        generation.set_adapter(f"{name}/2", engine.factors(name))
    versions = [f"{name}/{version}" for version in (0, 2) for name in names]
    completions = [one for (one,) in generation.generate([prompt] * 4, greedy, adapters=versions)]
    assert completions[0].logprobs == completions[1].logprobs
    for name, completion in zip(names, completions[2:], strict=True):
        sequence = torch.tensor([*prompt, *completion.token_ids])
        (result,) = engine.forward_backward([AdapterRow(name, sequence[:-1], sequence[1:])])
        torch.testing.assert_close(
            result.logprobs[len(prompt) - 1 :], torch.tensor(completion.logprobs), atol=1e-4, rtol=0
        )
        assert max(abs(a - b) for a, b in zip(completion.logprobs, base.logprobs, strict=True)) > 1e-2


@pytest.mark.gpu
@needs_gpu
def test_neighbours_change_nothing_on_a_gpu(tmp_path: Path) -> None:
    on_cpu = trained(tmp_path / "cpu")
    together = trained(tmp_path / "together", device="cuda")
    exact = trained(tmp_path / "exact", device="cuda", deterministic=True)
    for name in TENANTS:
        assert difference(together[name], on_cpu[name]) < 1e-4
        alone = trained(tmp_path / f"alone_{name}", [name], device="cuda")
        assert difference(together[name], alone[name]) < 1e-5
        alone = trained(tmp_path / f"exact_{name}", [name], device="cuda", deterministic=True)
        assert difference(exact[name], alone[name]) == 0.0


@pytest.mark.gpu
@needs_gpu
def test_training_and_sampling_share_the_base_on_a_gpu() -> None:
    lm = build_model("llama").to(torch.bfloat16)
    base = sum(parameter.numel() * parameter.element_size() for parameter in lm.parameters())
    engine = engine_of(lm, device="cuda")
    before = torch.cuda.memory_allocated()
    GenerationEngine.from_model(engine.lm, stop_token_ids=[], cuda_graphs=False)
    assert torch.cuda.memory_allocated() - before < base / 2


def short(row: AdapterRow) -> AdapterRow:
    return AdapterRow(row.adapter, row.tokens[:40], row.targets[:40], row.loss)


def test_mistakes_are_named(tmp_path: Path) -> None:
    engine = engine_of(tiny_model())
    engine.add("a", LoraConfig(), seed=0)
    ids = torch.tensor([4, 5])
    with user_error("an adapter must have a new name, a exists"):
        engine.add("a", LoraConfig(), seed=0)
    with user_error("an adapter must have been added, got ab: the nearest is a"):
        engine.forward_backward([AdapterRow("ab", ids, ids)])
    with user_error("tokens, targets and mask of a row have one length"):
        engine.forward_backward([AdapterRow("a", ids, ids[:1])])
    with user_error(r"token ids must be in 0..258, row 0 has 4..300"):
        engine.forward_backward([AdapterRow("a", ids, torch.tensor([4, 300]))])
    for target in ("lm_head", "norm", "nothing"):
        with user_error(f"must name linear layers of LlamaForCausalLM except the head, got .*{target}"):
            engine.add("b", LoraConfig(target_modules=["q_proj", target]), seed=0)
    with user_error("an adapter is a folder with adapter_config.json"):
        engine.load("b", tmp_path)
    other = random_adapter(tiny_model(hidden_size=64), tmp_path / "other", 0, ["q_proj"])
    with user_error(r"an adapter must fit its base, .* has \[4, 64\] for .*q_proj.lora_A.weight"):
        engine.load("b", Path(other))
    fits = random_adapter(tiny_model(), tmp_path / "fits", 0, ["q_proj"])
    with user_error("an adapter with its optimizer has optimizer.safetensors"):
        engine.load("b", Path(fits), with_optimizer=True)
    assert engine.names == ("a",)
    with user_error("in the model's dtype, got model.quantization nf4"):
        AdapterEngine.from_pretrained("m", world=engine.world, model=ModelConfig(quantization="nf4"))
    few = engine_of(build_model("gpt2"))
    few.add("a", LoraConfig(), seed=0)
    with user_error("a row must have at most 64 tokens, .*GPT2LMHeadModel.*row 0 has 65"):
        few.forward_backward([AdapterRow("a", torch.ones(65).long(), torch.ones(65).long())])
    with user_error("several adapters train in packed rows, BloomForCausalLM computes padding"):
        engine_of(build_model("bloom"))
