"""Environments that show images: what the actor reads, what is learned, what a checkpoint needs, what is refused."""

from __future__ import annotations

import base64
import io
import itertools
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.sampling import SamplingParams
from hybrid_rlhf.data.images.expansion import IMAGE_MARK, RowImages
from hybrid_rlhf.data.images.reading import png
from hybrid_rlhf.data.images.references import read_reference
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.image_loading import image_rules
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.environments import build_runner
from hybrid_rlhf.rl.environments.observations import ObservationEncoder
from hybrid_rlhf.rl.images import IMAGES, ImageCatalogue
from hybrid_rlhf.rl.rollouts.in_flight import AssignedPrompt
from hybrid_rlhf.rl.rollouts.lock_step import LockStep
from hybrid_rlhf.rl.types import Episode
from hybrid_rlhf.rl_step import run_rl
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.faults import Point, run_step
from tests.support.marks import slow
from tests.support.steps import MODULES, run_outputs, words, write_lines
from tests.support.tiny import save_tiny, tiny_model
from tests.support.vision import (
    build_vision,
    greedy_of_transformers,
    picture,
    save_vision,
    vision_folder,
    vision_processor,
    vision_tokenizer,
)

CPU = torch.device("cpu")
SIZES = [(24, 32), (64, 48), (32, 32)]


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


class Album:
    """Opens with text, with a picture or with the row's prompt, then shows one picture, none, and two."""

    shows_images = True

    def reset(self, row: Mapping[str, Any]) -> Any:
        self._row, self._turn = row, 0
        uri = f"data:image/png;base64,{base64.b64encode(png(picture(7, SIZES[0]))).decode()}"
        return {"text": "look", "picture": [part(uri), {"type": "text", "text": "look"}]}.get(row["opening"])

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self._turn += 1
        last = self._row.get("file", png(picture(5, SIZES[0])))
        shown = [
            [{"type": "text", "text": f"see {self._row['number']} "}, part(picture(self._row["number"] % 3, SIZES[1]))],
            "nothing",
            [
                part(last),
                {"type": "text", "text": " or "},
                *map(part, self._row.get("images", [])),
            ],
        ][min(self._turn, 3) - 1]
        return shown, sum(map(ord, completion)) % 32 / 32 - 0.5, False


# -- what the actor reads


def played(family: str, folder: Path, rows: Sequence[dict[str, Any]], kind: type = Album) -> list[Episode]:
    """Greedy episodes of rows, whose pictures are written to a folder."""
    path = str(vision_folder(family))
    tokenizer = load_tokenizer(path)
    world = solo_world(CPU)
    rollout = RolloutConfig(max_prompt_tokens=200, sampling=SamplingParams(max_new_tokens=300))
    config = EnvironmentConfig(path=f"{__name__}:{kind.__name__}", max_turns=4, max_turn_tokens=8)
    images = ImageCatalogue(rules=image_rules(path, tokenizer, max_pixels=2**20), folders=[folder])
    runner = build_runner(config, rollout=rollout, tokenizer=tokenizer, world=world, images=images)
    assert runner is not None
    engine = GenerationEngine.from_pretrained(path, dtype=torch.float32)
    params = SamplingParams(n=1, temperature=0.0, max_new_tokens=300, seed=1)
    prompts = [AssignedPrompt(place, row, params, False) for place, row in enumerate(rows)]
    episodes = LockStep(engine, runner, world, Timers(CPU), lambda count: None).play(prompts)
    return [episode for (episode,) in episodes]


def row_of(family: str, opening: str, number: int, **columns: Any) -> dict[str, Any]:
    text = vision_tokenizer(family).apply_chat_template(
        [{"role": "user", "content": "of the row"}], tokenize=False, add_generation_prompt=True
    )
    return {
        "input_ids": vision_tokenizer(family).encode(text, add_special_tokens=False),
        "prompt": json.dumps([{"role": "user", "content": "of the row"}]),
        "columns": json.dumps({"opening": opening, "number": number, **columns}),
    }


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_greedy_turns_are_those_of_transformers_after_the_same_conversation(family: str, tmp_path: Path) -> None:
    """With three axes of positions and with one: a picture in the middle moves the positions of all that follows."""
    picture(5, SIZES[0]).save(tmp_path / "5.png")
    rows = [row_of(family, "text", 1, file=f"{tmp_path}/5.png"), row_of(family, "picture", 2)]
    episodes = played(family, tmp_path / IMAGES, rows)
    lm = build_vision(family)
    tokenizer, processor = vision_tokenizer(family), vision_processor(family)
    stops = {tokenizer.eos_token_id}
    for number, episode in enumerate(episodes, start=1):
        opened = [picture(7, SIZES[0])] if number == 2 else []
        shown = [[picture(number, SIZES[1])], [], [picture(5, SIZES[0])]]
        contents: list[Any] = [
            [{"type": "text", "text": f"see {number} "}, {"type": "image"}],
            "nothing",
            [{"type": "image"}, {"type": "text", "text": " or "}],
        ]
        runs = [
            (sampled, [*of])
            for sampled, of in itertools.groupby(range(len(episode.sampled)), episode.sampled.__getitem__)
        ]
        assert [sampled for sampled, _ in runs] == [True, False] * 3 + [True] and episode.failure is None
        before = len(episode.prompt)
        for turn, (sampled, places) in enumerate(runs):
            ids = [episode.token_ids[place] for place in places]
            pictures = opened + [image for of_turn in shown[: (turn + 1) // 2] for image in of_turn]
            if sampled:
                expected = greedy_of_transformers(family, lm, episode.ids[:before], pictures, 8)
                assert ids == expected[: len(ids)] and (len(ids) == 8 or ids[-1] in stops)
            else:
                messages = [("user", "."), ("assistant", "HERE"), ("tool", contents[turn // 2])]
                rendered = tokenizer.apply_chat_template(
                    [{"role": role, "content": content} for role, content in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                ).partition("HERE")[2]
                new = shown[turn // 2]
                if new:
                    given = {"images": [new], "text": [rendered], "input_data_format": "channels_last"}
                    expected = processor._processor(**given)["input_ids"][0]
                else:
                    expected = tokenizer.encode(rendered, add_special_tokens=False)
                assert ids == [*expected][episode.token_ids[places[0] - 1] in stops :]
                assert not any(episode.logprobs[place] for place in places)
            before += len(ids)
    assert len(stored(tmp_path)) == 4, "one file for each picture"


class Disordered(Album):
    """Opens with results of tools in another order than that of their calls, as threads end."""

    def reset(self, row: Mapping[str, Any]) -> Any:
        super().reset(row)
        calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
        results = [
            {"role": "tool", "tool_call_id": name, "content": [part(picture(number)), {"type": "text", "text": name}]}
            for name, number in (("b", 1), ("a", 0))
        ]
        asked = {"role": "assistant", "content": "look", "tool_calls": calls}
        return [{"role": "user", "content": "show"}, asked, *results]


def test_pictures_stay_with_the_results_of_tools(tmp_path: Path) -> None:
    """The first call's picture was that of the second."""
    (episode,) = played("qwen2_5_vl", tmp_path, [row_of("qwen2_5_vl", "text", 1)], Disordered)
    images = [read_reference(picture(number), "it", folder=None, max_pixels=2**20) for number in (0, 1)]
    assert [*episode.images[:2]] == [image.digest for image in images]
    expanded = [vision_processor("qwen2_5_vl").expansion_text(image.width, image.height) for image in images]
    text = vision_tokenizer("qwen2_5_vl").decode(episode.prompt)
    assert text.index(f"{expanded[0]}<|vision_end|>a") < text.index(f"{expanded[1]}<|vision_end|>b")


class Broken(Album):
    """Shows what no model can read."""

    def step(self, completion: str) -> tuple[Any, float, bool]:
        shown = {
            "damaged": [part(png(picture(1))[:100])],
            "missing": [part("no such file.png")],
            "number": [part(3)],
            "thin": [part(Image.new("RGB", (1000, 2)))],
            "empty": [part(Image.open(io.BytesIO(png(picture(1))[:100])))],
            "none": [{"type": "image"}],
            "kind": [{"type": "video", "video": "x"}],
            "long": [part(b"x" * 10_000), {"type": "video", "video": b"x" * 10_000}],
            "token": "<|image_pad|>",
        }
        return shown[self._row["how"]], 1.0, False


class Undeclared(Broken):
    """Does not say that it shows images."""

    shows_images = False


@pytest.mark.parametrize(
    ("kind", "how", "reason"),
    [
        (Broken, "damaged", "step: an image must be a complete PNG, JPEG, WebP, GIF or BMP file, image 1 is damaged"),
        (Broken, "missing", "step: an image must be a file, no such file.png does not exist: check the path"),
        (Broken, "number", "step: an image must be a path, a data URI or bytes, image 1 is int"),
        (Broken, "thin", "step: the longer side of an image must be at most 200 times the shorter, image 1 has 1000x2"),
        (Broken, "empty", "step: an image of Pillow must have its pixels, image 1 has none: call its load()"),
        (Broken, "none", "step: a row needs an image for each placeholder, got 0 in its column and 1 placeholders"),
        (Broken, "kind", "step: the content of a message must be text or a list of"),
        (Broken, "long", "step: the content of a message must be text or a list of"),
        (Broken, "token", "a text must not have <|image_pad|>, which stands for an image"),
        (Undeclared, "damaged", "step: an environment that shows images must have shows_images = True: set it, or"),
    ],
)
def test_what_cannot_be_read_fails_the_episode_in_one_line(kind: type, how: str, reason: str, tmp_path: Path) -> None:
    (episode,) = played("qwen2_5_vl", tmp_path, [row_of("qwen2_5_vl", "text", 1, how=how)], kind)
    assert episode.failure is not None and episode.failure.startswith(reason)
    assert len(episode.failure) <= 500 and episode.images == [] and sum(episode.turn_rewards) == 1.0


def test_a_model_of_text_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before it is loaded."""
    save_tiny(tmp_path / "text", tiny_model())
    with user_error("environment.path: .*:Album shows images: images need"):
        run_here(tmp_path / "run", folder, f"--model.path {tmp_path}/text", rows="plain")


TOLD = "{% if message['role'] == 'tool' %}{{ message['content'] if message['content'] is string }}{% else %}"


@pytest.mark.parametrize(("template", "role"), [("", "tool"), (TOLD, "user")])
def test_text_of_an_observation_is_cut_and_its_images_are_not(template: str, role: str) -> None:
    """With a template that writes no images of tools, observations with images are turns of the user."""
    family = "qwen2_5_vl"
    tokenizer, layout = vision_tokenizer(family), vision_processor(family)
    if template:
        before, content, after = tokenizer.chat_template.partition("{% if message['content'] is string %}")
        turn, end, rest = after.partition("{{ '<|im_end|>")
        tokenizer.chat_template = before + template + content + turn + "{% endif %}" + end + rest
    image = read_reference(picture(1), "it", folder=None, max_pixels=2**20)
    turns = ObservationEncoder(tokenizer, max_observation_tokens=25)
    told = turns.fitting(f"abcde{IMAGE_MARK}fghijfghijfghijfghij{IMAGE_MARK}klm")
    ids = turns.observation_ids(told, end_token=None, images=RowImages(layout, [image] * 2))
    shown = f"<|vision_start|>{layout.expansion_text(image.width, image.height)}<|vision_end|>"
    expected = f"{role}\nabcde{shown}f\n[truncated]\nhij{shown}klm"
    assert tokenizer.decode(ids) == f"<|im_end|>\n<|im_start|>{expected}<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.decode(turns.observation_ids("abc", end_token=None, images=RowImages(layout, [])))
    assert text == "<|im_end|>\n<|im_start|>tool\nabc<|im_end|>\n<|im_start|>assistant\n"


# -- whole runs


class Rare(Album):
    """Shows a picture after the first turn of every fourth row, and none to others."""

    def step(self, completion: str) -> tuple[Any, float, bool]:
        (_, *shown), reward, _ = super().step(completion)
        is_shown = self._row["number"] % 4 == 0 and self._turn == 1
        return (shown if is_shown else "nothing"), reward, False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows with a picture and without, whose episodes begin in different ways; of models by family."""
    folder = tmp_path_factory.mktemp("rows")
    picture(9, SIZES[2]).save(folder / "9.png")
    given: list[dict[str, Any]] = [
        {"opening": "text"},
        {"opening": "row", "prompt": "what is <image>", "images": ["9.png"]},
        {"opening": "picture"},
        {"opening": "text", "images": ["9.png"]},
    ]
    write_lines(folder / "mixed.jsonl", ({"prompt": "no", "number": row} | given[row % 4] for row in range(12)))
    write_lines(folder / "plain.jsonl", ({"prompt": "no", "number": row, "opening": "text"} for row in range(12)))
    return folder


GRPO = "--algorithm grpo --algorithm.mini_batches 2 --rollout.sampling.n 2"


def line_of(output: Path, folder: Path, *more: str, family: str = "qwen2_5_vl", rows: str = "mixed") -> list[str]:
    model = folder / family
    if not model.exists():
        save_vision(model, family, build_vision(family, spread=2.0))
    line = f"--model.path {model} --data.sources {folder}/{rows}.jsonl --output_dir {output}".split()
    line += f"--data.cache_dir {folder}/cache --data.eval_fraction 0 --logging.sinks [] --train.max_steps 2".split()
    line += "--rollout.prompts_per_step 4 --rollout.sampling.max_new_tokens 400 --rollout.max_prompt_tokens 128".split()
    line += "--environment.max_turns 4 --environment.max_turn_tokens 6 --actor.optimizer.lr 1e-3".split()
    line += "--model.dtype float32 --logging.samples_every 1 --environment.path".split()
    return [*line, f"{__file__}:Album", *words(GRPO, *more)]


def outputs(output: Path) -> dict[str, Any]:
    found = run_outputs(output)
    return found | {"metrics": [step for step in found["metrics"] if step["step"]]}


def run_here(output: Path, folder: Path, *more: str, **how: str) -> dict[str, Any]:
    run_rl(parse_config(RLConfig, line_of(output, folder, *more, **how)))
    return outputs(output)


def require_own(metrics: Sequence[dict[str, float]], limit: float = 1e-5) -> None:
    """The log-probs of the sampler are those of the trainer, and something is learned."""
    assert all(step["rollout/logprob_abs_diff_mean"] < limit for step in metrics)
    assert all(step["actor/grad_norm"] > 1e-3 and step["environment/turns"] == 4 for step in metrics)


@pytest.mark.parametrize(
    ("family", "dtype", "limit"),
    [("qwen2_5_vl", "float32", 1e-5), ("smolvlm", "float32", 1e-5), ("qwen2_5_vl", "bfloat16", 0.1)],
)
def test_what_is_shown_is_sampled_and_learned_alike(
    family: str, dtype: str, limit: float, folder: Path, tmp_path: Path
) -> None:
    """Ratios are those of equal models in sampler and trainer; the run keeps each picture that was shown once."""
    more = (
        f"--algorithm.kl.coef 0.1 --model.dtype {dtype}",
        "--reward.components",
        f"[{{function: '{__file__}:counted'}}]",
    )
    found = run_here(tmp_path, folder, *more, family=family)
    require_own(found["metrics"], limit)
    recorded = [image for row in found["samples"] for image in json.loads(row).get("shown_images", ())]
    assert {image["digest"]: Path(image["path"]) for image in recorded} == {
        file.name: file for file in stored(tmp_path)
    }
    kept = [read_reference(file.read_bytes(), "it", folder=None, max_pixels=2**20) for file in stored(tmp_path)]
    shown = [picture(7, SIZES[0]), picture(5, SIZES[0]), *(picture(number, SIZES[1]) for number in range(3))]
    expected = [read_reference(image, "it", folder=None, max_pixels=2**20) for image in shown]
    assert sorted(image.digest for image in kept) == sorted(image.digest for image in expected)


def counted(
    prompts: Sequence[Any],
    completions: Sequence[str],
    images: list[list[Image.Image]],
    opening: list[str],
    number: list[int],
    **columns: Any,
) -> list[float]:
    """Requires the pictures of the prompt and those that the environment has shown, in their order."""
    of_row = picture(9, SIZES[2])
    for shown, begins, n in zip(images, opening, number, strict=True):
        own, first = [of_row] * (n % 4 in (1, 3)), [picture(7, SIZES[0])] * (begins == "picture")
        expected = [*own, *first, picture(n % 3, SIZES[1]), picture(5, SIZES[0]), *own]
        assert [image.tobytes() for image in shown] == [image.tobytes() for image in expected]
    return [0.0] * len(prompts)


def stored(output: Path) -> list[Path]:
    """The files of pictures that an environment has shown."""
    return [path for path in (output / IMAGES).rglob("*") if path.is_file()]


COMPARED = "loss/policy objective/scores policy/entropy actor/grad_norm completions/mean_length".split()


@pytest.mark.parametrize("vision", ["freeze", slow("train")])
def test_ranks_of_which_one_has_no_picture_wait_for_each_other(vision: str, folder: Path, tmp_path: Path) -> None:
    """Under stage 3 every rank computes every module in every micro-batch."""
    options = f"--model.vision {vision} --train.micro_batch_size 1 --environment.path {__file__}:Rare"
    alone = run_here(tmp_path / "alone", folder, options, rows="plain")["metrics"]
    line = line_of(tmp_path / "two", folder, options, "--actor.zero.stage 3", rows="plain")
    assert run_step(MODULES["ppo"], 2, line) == [0, 0]
    found = outputs(tmp_path / "two")["metrics"]
    require_own(found)
    for step, expected in zip(found, alone, strict=True):
        for name in COMPARED:
            assert step[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-4), (name, step["step"])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_learns_the_same(sent: signal.Signals, folder: Path, tmp_path: Path) -> None:
    """In its folder after a step; within a step in another one, twice: no environment shows its pictures again."""
    options = "--algorithm.epochs 2", "--train.save_every 1"
    assert run_step(MODULES["ppo"], 1, line_of(tmp_path / "whole", folder, *options)) == [0]
    cut = line_of(tmp_path / "cut", folder, *options)
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 6, signal=sent)
    assert run_step(MODULES["ppo"], 1, cut, point) == [-sent if sent == signal.SIGKILL else 128 + sent]
    if sent == signal.SIGTERM:
        cut = line_of(tmp_path / "other", folder, *options)
        again = [*cut, "--resume", f"{tmp_path}/cut/checkpoints/step_1_update_2"]
        assert run_step(MODULES["ppo"], 1, again, replace(point, call=1)) == [128 + sent]
        (tmp_path / "cut").rename(tmp_path / "moved")
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    found, whole = outputs(Path(parse_config(RLConfig, cut).output_dir)), outputs(tmp_path / "whole")
    assert found["metrics"][-1] == whole["metrics"][-1]
    assert {name: found[name] for name in found if name.startswith("actor")} == {
        name: whole[name] for name in whole if name.startswith("actor")
    }


def test_a_step_is_replayed(folder: Path, tmp_path: Path) -> None:
    run_here(tmp_path / "run", folder)
    (tmp_path / "scratch").mkdir()
    line = f"{tmp_path}/run --step 2 --scratch {tmp_path}/scratch --index 5".split()
    assert run_step("hybrid_rlhf.cli.runs.replay", 1, line) == [0]
    assert json.loads((tmp_path / "scratch" / "result.json").read_text())["identical"]


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_a_lag_shows_the_same(ranks: int, folder: Path, tmp_path: Path) -> None:
    """Turns wait between two slices of time, and go to all ranks that share the model, with their pictures."""
    options = f"--rollout.tensor_parallel {ranks}", "--actor.optimizer.lr 0 --train.max_steps 3"
    texts = []
    for lag in (0, 1):
        line = line_of(tmp_path / str(lag), folder, *options, f"--rollout.max_lag {lag}")
        assert run_step(MODULES["ppo"], ranks, line) == [0] * ranks
        found = outputs(tmp_path / str(lag))
        assert all(step["rollout/logprob_abs_diff_mean"] < 1e-5 for step in found["metrics"])
        texts.append([json.loads(row)["completion"] for row in found["samples"]])
    assert texts[0] == texts[1]
