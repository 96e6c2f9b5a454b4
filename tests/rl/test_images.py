"""RL on prompts with images: what is sampled, scored and learned is of the picture, on any ranks, also after a kill."""

from __future__ import annotations

import base64
import io
import json
import pickle
import signal
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.data.images.references import ImageReference, read_reference, stored_images
from hybrid_rlhf.models.vision import FeatureCache, ImageEncoder, RowImage
from hybrid_rlhf.rl.images import ImageCatalogue, digests_of
from hybrid_rlhf.rl.replay.recorded import RecordedStep
from hybrid_rlhf.rl.rewards import CompletionTexts
from hybrid_rlhf.rl.rewards.endpoint import EndpointReward
from hybrid_rlhf.rl.types import Episode, Rollout
from hybrid_rlhf.rl_step import run_rl
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.observability.token_records import TokenRecords
from tests.support.errors import user_error
from tests.support.faults import Point, run_step
from tests.support.judges import judge_of, judge_server
from tests.support.marks import faults, slow
from tests.support.servers import json_server
from tests.support.steps import MODULES, run_outputs, words, write_lines
from tests.support.tiny import save_tiny, tiny_scorer
from tests.support.vision import build_vision, picture, save_vision, vision_tokenizer

SIZES = [(24, 32), (48, 32), (32, 32), (64, 48)]
GRPO = "--algorithm grpo --algorithm.mini_batches 2 --algorithm.epochs 2 --rollout.sampling.n 2"
PPO = "--algorithm ppo --algorithm.mini_batches 2 --critic.optimizer.lr 1e-3"
FAMILIES = ["qwen3_vl", "idefics3", faults("gemma3"), faults("qwen3_5"), faults("llava")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of prompts with a picture, with two, with that of another row, and with none; of models by family."""
    folder = tmp_path_factory.mktemp("rows")
    for seed, size in enumerate(SIZES):
        picture(seed, size).save(folder / f"{seed}.png")
    given = [
        {"prompt": "what is <image>", "images": ["0.png"]},
        {"prompt": "<image> or <image>", "images": ["1.png", "2.png"]},
        {"prompt": "no picture"},
        {"prompt": "again <image>", "images": ["0.png"]},
        {"prompt": "say", "image": "3.png"},
    ]
    write_lines(folder / "rows.jsonl", (given[row % 5] | {"number": row} for row in range(30)))
    return folder


def model_in(folder: Path, family: str) -> Path:
    """A model with gradients of a usual size."""
    model = folder / family
    return model if model.exists() else save_vision(model, family, build_vision(family, spread=2.0))


def red(
    prompts: Sequence[Any], completions: Sequence[str], images: list[list[Image.Image]], **columns: Any
) -> list[float]:
    """Favours late letters in answers to red pictures, and early ones to others."""
    scores = []
    for prompt, completion, of_row in zip(prompts, completions, images, strict=True):
        assert prompt[0]["content"].count("<image>") == len(of_row)
        is_red = any(image.resize((1, 1)).getpixel((0, 0))[0] > 100 for image in of_row)  # type: ignore[index]
        scores.append(sum(map(ord, completion)) % 32 / 32 * (1.0 if is_red else -1.0))
    return scores


def line_of(output: Path, folder: Path, family: str, *more: str) -> list[str]:
    line = f"--model.path {model_in(folder, family)} --data.sources {folder}/rows.jsonl --output_dir {output}".split()
    line += f"--data.cache_dir {folder}/cache --data.eval_fraction 0 --logging.sinks [] --train.max_steps 3".split()
    line += "--rollout.prompts_per_step 4 --rollout.sampling.max_new_tokens 6 --rollout.max_prompt_tokens 128".split()
    line += "--actor.optimizer.lr 1e-3 --model.dtype float32 --logging.samples_every 1".split()
    return [*line, "--reward.components", f"[{{function: '{__file__}:red'}}]", *words(*more)]


def run(output: Path, folder: Path, family: str, *more: str, ranks: int = 1) -> dict[str, Any]:
    """The outputs of a run in processes of its own."""
    assert run_step(MODULES["ppo"], ranks, line_of(output, folder, family, *more)) == [0] * ranks
    return _outputs(output)


def run_here(output: Path, folder: Path, family: str, *more: str) -> dict[str, Any]:
    run_rl(parse_config(RLConfig, line_of(output, folder, family, *more)))
    return _outputs(output)


def _outputs(output: Path) -> dict[str, Any]:
    outputs = run_outputs(output)
    return outputs | {"metrics": [step for step in outputs["metrics"] if step["step"]]}


def require_own(metrics: Sequence[dict[str, float]], limit: float = 1e-4) -> None:
    """The log-probs of the sampler are those of the trainer, and something is learned."""
    assert all(step["rollout/logprob_abs_diff_mean"] < limit for step in metrics)
    assert all(step["actor/grad_norm"] > 1e-3 for step in metrics)


# -- whole runs


@pytest.mark.parametrize("family", FAMILIES)
def test_grpo_and_ppo_learn_from_pictures(family: str, folder: Path, tmp_path: Path) -> None:
    """With critic, reference and a reward model that read them; the check of the sampler is in each step."""
    model = model_in(folder, family)
    scorer = RewardComponentConfig(model=str(_scorer(folder, family)))
    both = f"[{{function: '{__file__}:red'}}, {{model: {scorer.model}}}]"
    grpo = run_here(tmp_path / "grpo", folder, family, GRPO, "--reference.path", str(model))
    ppo = run_here(tmp_path / "ppo", folder, family, PPO, "--reward.components", both, "--algorithm.kl.coef 0.1")
    for metrics in (grpo["metrics"], ppo["metrics"]):
        require_own(metrics)
        assert metrics[0]["objective/kl"] == pytest.approx(0, abs=1e-4) and metrics[-1]["objective/kl"] != 0
    assert all(step["critic/grad_norm"] > 1e-3 for step in ppo["metrics"])
    rows = [json.loads(line) for line in grpo["samples"]]
    assert {row["prompt"][0]["content"] for row in rows} >= {"again <image>", "<image> or <image>"}
    assert all(len(row.get("images", ())) == row["prompt"][0]["content"].count("<image>") for row in rows)
    named = {image["path"]: ImageReference(**image).image().size for row in rows for image in row.get("images", ())}
    assert {Path(path).name: size for path, size in named.items()} == {f"{i}.png": s for i, s in enumerate(SIZES)}
    assert any("images" not in row for row in rows), "of a prompt of text"


def _scorer(folder: Path, family: str) -> Path:
    """A reward model with the actor's tower and tokens, made by a step of training."""
    output = folder / f"scorer_{family}"
    if not output.exists():
        rows = write_lines(
            folder / "pairs.jsonl",
            (
                {"prompt": "is <image>", "images": [f"{i % 4}.png"], "chosen": f"{i}", "rejected": "no"}
                for i in range(8)
            ),
        )
        line = f"--model.path {model_in(folder, family)} --data.sources {rows} --output_dir {output}".split()
        line += f"--data.cache_dir {folder}/cache --data.max_length 128 --train.max_steps 1".split()
        line += "--train.global_batch_size 4 --data.eval_fraction 0 --logging.sinks [] --model.dtype float32".split()
        assert run_step(MODULES["reward"], 1, line) == [0]
    return output


def test_a_learning_rate_of_zero_never_moves_a_ratio(folder: Path, tmp_path: Path) -> None:
    """Ratios are exactly 1 where the weights are those of the old log-probs, also of rows with images."""
    found = run_here(tmp_path, folder, "qwen3_vl", GRPO, "--actor.optimizer.lr 0")["metrics"]
    assert all(step["val/ratio"] == 1.0 and step["policy/approxkl"] == 0.0 for step in found)


@pytest.mark.parametrize("vision", ["freeze", faults("train")])
def test_sixteen_bits(vision: str, folder: Path, tmp_path: Path) -> None:
    options = GRPO, "--model.dtype bfloat16 --model.vision", vision
    require_own(run_here(tmp_path, folder, "qwen3_vl", *options)["metrics"], 0.1)


COMPARED = "loss/policy objective/scores objective/kl policy/entropy actor/grad_norm completions/mean_length".split()


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics by `model.vision`, of a rank without ZeRO."""
    found: dict[str, Any] = {}

    def metrics(vision: str) -> list[dict[str, float]]:
        if vision not in found:
            options = GRPO, f"--model.vision {vision} --actor.zero.stage 0"
            found[vision] = run_here(tmp_path_factory.mktemp(vision), folder, "qwen3_vl", *options)["metrics"]
        result: list[dict[str, float]] = found[vision]
        return result

    return metrics


@pytest.mark.parametrize(
    ("ranks", "vision", "more"),
    [
        (1, "freeze", "--train.micro_batch_size 1"),
        (1, "train", "--actor.zero.stage 3 --train.micro_batch_size 2"),
        (2, "train", "--actor.zero.stage 3"),
        (2, "freeze", "--actor.zero.stage 2 --rollout.tensor_parallel 2"),
        (2, "train", "--placement separation"),
        faults(2, "freeze", "--actor.zero.stage 3"),
        faults(3, "train", '--placement {"sampler":{"ranks":0},"actor":{"ranks":"1-2"}} --actor.zero.stage 3'),
        faults(2, "freeze", "--placement separation --rollout.keep_weights false"),
        faults(2, "train", "--actor.zero.stage 3 --rollout.tensor_parallel 2 --rollout.keep_weights true"),
        faults(2, "train", "--actor.zero.stage 1"),
        faults(2, "train", "--actor.zero.stage 2 --rollout.keep_weights true"),
    ],
)
def test_ranks_stages_and_micro_batches_do_not_change_a_run(
    ranks: int, vision: str, more: str, alone: Any, folder: Path, tmp_path: Path
) -> None:
    """Under stage 3 each rank reads images with a copy of the tower, which must follow one that is trained."""
    options = GRPO, f"--model.vision {vision} {more}"
    found = run(tmp_path / "run", folder, "qwen3_vl", *options, ranks=ranks)["metrics"]
    require_own(found)
    for step, expected in zip(found, alone(vision), strict=True):
        for name in COMPARED:
            assert step[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-4), (name, step["step"])


@pytest.mark.parametrize(
    "more",
    [
        "--algorithm.dynamic_sampling.max_refills 1",
        slow("--model.vision train"),
        slow("--rollout.max_lag 1 --rollout.kv_cache_gib 0.1 --rollout.sampling.max_new_tokens 12"),
    ],
)
def test_a_killed_run_learns_the_same(more: str, folder: Path, tmp_path: Path) -> None:
    """Within a step, and with completions of other steps in flight: the checkpoint has digests, the rows images."""
    options = GRPO.replace("grpo", "dapo") if "dynamic" in more else GRPO, more, "--train.save_every 1"
    whole = run(tmp_path / "whole", folder, "qwen3_vl", *options)
    cut = line_of(tmp_path / "cut", folder, "qwen3_vl", *options)
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 7)
    assert run_step(MODULES["ppo"], 1, cut, point) == [-signal.SIGKILL]
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    assert _outputs(tmp_path / "cut") == whole


def test_a_step_is_replayed_branched_and_scored_again(folder: Path, tmp_path: Path) -> None:
    """With the pictures of the data set: a record has none."""
    run_here(tmp_path / "run", folder, "qwen3_vl", GRPO)

    def replay(name: str, index: int, *more: str) -> Any:
        (tmp_path / name).mkdir()
        line = f"{tmp_path}/run --step 2 --scratch {tmp_path / name} --index {index}".split()
        assert run_step("hybrid_rlhf.cli.runs.replay", 1, [*line, *more]) == [0]
        return json.loads((tmp_path / name / "result.json").read_text())

    rows = RecordedStep.read(tmp_path / "run", 2).rows
    index = next(row["index"] for row in rows if "<image>" in row["prompt"][0]["content"])
    first = TokenRecords(tmp_path / "run").read(2, index)
    found = replay("branch", index, "--branch.token", str(first.prompt_length + 2), "--branch.n", "2")
    assert found["identical"] and len(found["completions"]) == 2
    scored = replay("score", index, "--rescore.completion=a red answer")
    sign = 1.0 if rows[index]["score"] > 0 else -1.0
    assert scored["score"] == pytest.approx(sign * (sum(map(ord, "a red answer")) % 32) / 32)


@pytest.mark.parametrize(
    ("family", "base"), [("idefics3", ""), ("qwen3_vl", "--model.quantization nf4")], ids=["plain", "4 bits"]
)
def test_ptx_and_adapters(family: str, base: str, folder: Path, tmp_path: Path) -> None:
    texts = write_lines(
        folder / "texts.jsonl",
        ({"prompt": "is <image>", "images": [f"{i % 4}.png"], "completion": f"{i}"} for i in range(8)),
    )
    more = f"--ptx.coef 0.1 --ptx.sources {texts} --ptx.max_length 128 --actor.lora.rank 2"
    found = run_here(tmp_path, folder, family, GRPO, more, base)["metrics"]
    require_own(found)
    assert all(step["loss/ptx"] > 0 for step in found)


# -- the tower


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """What towers compute from now on."""
    computed: list[list[torch.Tensor]] = []
    features = ImageEncoder.features

    def noted(self: ImageEncoder, arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        computed.append(features(self, arguments))
        return computed[-1]

    monkeypatch.setattr(ImageEncoder, "features", noted)
    return computed


def test_a_frozen_tower_runs_once_for_each_image_of_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sampling, of the reference, and in the updates of five steps; the second weight sync is checked
    with an image of its own, in sampler and trainer."""
    computed = counted(monkeypatch)
    run_here(tmp_path, folder, "qwen3_vl", GRPO, "--train.max_steps 5", "--algorithm.kl.coef 0.1")
    assert len(computed) == len(SIZES) + 2


def test_a_trained_tower_changes_what_is_sampled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that an older tower computed is read: a sampler with it would differ from the trainer."""
    computed = counted(monkeypatch)
    found = run_here(tmp_path, folder, "qwen3_vl", GRPO, "--model.vision train --actor.optimizer.lr 1e-2")
    require_own(found["metrics"])
    means = {round(float(part[0].detach().mean()), 6) for part in computed}
    assert len(means) > 3 * len(SIZES)
    before, after = (load_file(path / "model.safetensors") for path in (folder / "qwen3_vl", tmp_path / "actor"))
    tower = [name for name in before if "visual." in name]
    assert tower and all(not torch.equal(before[name], after[name]) for name in tower)


def test_the_cache_forgets_the_oldest_beyond_its_budget() -> None:
    class Encoder:
        dtype = torch.float32
        computed_keys: list[int] = []

        def joined(self, images: Sequence[RowImage], dtype: torch.dtype) -> dict[str, torch.Tensor]:
            return images[0].load()

        def computed(self, arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            self.computed_keys.append(int(arguments["key"]))
            return [torch.full((4, 2), float(arguments["key"])), torch.zeros(4, 2)]

    encoder: Any = Encoder()
    images = [RowImage(lambda key=key: {"key": torch.tensor(key)}, 4, key) for key in range(3)]  # type: ignore[misc]
    cache = FeatureCache(2 * 64)
    assert cache.of(encoder, images[:2])[0][:, 0].tolist() == [0.0] * 4 + [1.0] * 4
    cache.of(encoder, [images[0], images[2], images[0], images[1]])
    assert encoder.computed_keys == [0, 1, 2, 1]


# -- references


def test_rows_in_flight_have_no_bytes(tmp_path: Path) -> None:
    """512 prompts with 8 completions each would have a GiB of compressed images of a megapixel."""
    chance = torch.Generator().manual_seed(0)
    pictures = [torch.randint(0, 256, (128, 128, 3), generator=chance, dtype=torch.uint8) for _ in range(16)]
    references = [
        read_reference(Image.fromarray(pixels.numpy()), "image", folder=None, max_pixels=2**20, store=tmp_path)
        for pixels in pictures
    ]
    given = [{"input_ids": [1], "images": stored_images([reference])} for reference in references]
    data = Dataset.from_list([*given, {"input_ids": [2], "images": None}]).select(range(16, -1, -1))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) > 16 * 40_000
    catalogue = ImageCatalogue(data)
    tracemalloc.start()
    prompts = [data[row] for row in range(17)]
    digests = [digests_of(prompt) for prompt in prompts]
    episodes = [Episode([1, 2], [3], images=of_row) for of_row in digests for _ in range(8)]
    rollout = Rollout.of(episodes, [row // 8 for row in range(17 * 8)])
    found = catalogue(rollout.rows([8 * row + 3 for row in range(17)]))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 300_000
    assert found[0] == [] and [of_row[0].digest for of_row in found[1:]] == [r.digest for r in references[::-1]]
    assert all(image.image().tobytes() for of_row in found for image in of_row)  # which compares the digest
    copied = pickle.loads(pickle.dumps(found[1][0]))  # sent to ranks that share the model
    assert copied.image().tobytes() == found[1][0].image().tobytes()


# -- rewards


def test_an_endpoint_gets_the_parts_of_openai() -> None:
    asked: list[Any] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked.append(json.loads(body))
        return 200, {"scores": [1.0] * len(asked[0]["prompts"])}

    pictures = [picture(1), picture(2)]
    images = [read_reference(png(image), "image", folder=None, max_pixels=2**20) for image in pictures]
    texts = CompletionTexts(
        [[{"role": "user", "content": text}] for text in ("<image>is<image>", "a text <image>", "<image> in <image>")],
        ["x", "y", "z"],
        {},
        [images, [], images[:1]],
    )
    with json_server(answer) as url:
        component = EndpointReward(RewardComponentConfig(urls=(f"{url}/score",)), device=torch.device("cpu"))
        found = component.score(texts)
    assert found.values == [1.0] * 3
    (first,), (second,), (third,) = asked[0]["prompts"]
    assert third["content"][1:] == [{"type": "text", "text": " in <image>"}], "a picture is not lost for a text"
    assert second == {"role": "user", "content": "a text <image>"}
    assert [part["type"] for part in first["content"]] == ["image_url", "text", "image_url"]
    for part, expected in zip(first["content"][::2], pictures, strict=True):
        content = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
        assert Image.open(io.BytesIO(content)).tobytes() == expected.tobytes()


def test_a_judge_sees_the_images_of_the_prompt() -> None:
    """In their places in its text, one case for each picture, and none of an environment."""
    pictures = [picture(1), picture(2), picture(3)]
    images = [read_reference(png(image), "image", folder=None, max_pixels=2**20) for image in pictures]
    prompt = [{"role": "user", "content": "<image>is<image>"}]
    texts = CompletionTexts(
        [prompt] * 3, ["a <image>"] * 3, {}, [images, [images[1], images[0]], [images[0], images[1], images[0]]]
    )
    with judge_server(lambda asked: [3 + (asked.images[0] == pictures[0].tobytes())]) as server:
        judge = judge_of(server)
        assert judge.score(texts, [0, 1, 2]).values == [
            pytest.approx(1 / 3),
            pytest.approx(2 / 9),
            pytest.approx(1 / 3),
        ]
        assert len(server.asked) == 2, "a verdict is kept by texts and pictures"
    asked = max(server.asked, key=lambda one: one.images[0] == pictures[0].tobytes())
    assert asked.images == [image.tobytes() for image in pictures[:2]]
    assert asked.marked == {"conversation": "user: [image]is[image]", "answer_1": "a <image>"}


def unnamed(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    assert "images" not in columns
    return [float(len(text)) for text in completions]


def test_a_function_that_does_not_name_images_gets_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(tmp_path, folder, "qwen3_vl", GRPO, "--reward.components", f"[{{function: '{__file__}:unnamed'}}]")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rollout.backend module"], "prompts with rollout.backend module must be text, got images"),
        (["--reward.components", "[{model: TEXT}]"], "must read the tokens of the actor"),
        (
            ["--reward.components", "[{model: ALIKE}]"],
            "must read the images of the rows: images need",
        ),
        (
            ["--reward.components", "[{urls: ['http://localhost:1/x'], protocol: openrlhf, name: far}]"],
            "reward component far must have the protocol scores to read images, got openrlhf",
        ),
    ],
)
def test_what_reads_text_alone_is_refused(more: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    for name in ("TEXT", "ALIKE"):
        tokenizer = vision_tokenizer("qwen3_vl")
        if name == "TEXT":
            tokenizer.chat_template = "{{ messages }}"
        save_tiny(tmp_path / name, tiny_scorer(vocab_size=len(tokenizer)))
        tokenizer.save_pretrained(tmp_path / name)
    more = [word.replace("TEXT", f"{tmp_path}/TEXT").replace("ALIKE", f"{tmp_path}/ALIKE") for word in more]
    with user_error(message):
        run_here(tmp_path / "run", folder, "qwen3_vl", GRPO, *more)
