"""Writes the pictures of docs/board.md from real runs: `make pictures` trains them first, in ten minutes on two cores.

SmolLM2-135M learns to add in few words, by GRPO and by PPO. It needs a browser, and Pillow (extra
bench). Runs that have finished in build/pictures are kept.
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
from typing import Any

from PIL import Image

from hybrid_rlhf.runtime.files.names import FINISHED_FILE
from tests.support.board import ServedBoard, served_board
from tests.support.browser import PHONE, browser_context, checked_page, show
from tests.support.runs import ENVIRONMENT, ROOT
from tests.support.steps import write_lines

IMAGES = ROOT / "docs" / "images"
FOLDER = ROOT / "build" / "pictures"
_COLOURS = 128
"""Of a picture: a third of its bytes, and no difference that is seen."""
_SIZE = {"width": 1280, "height": 760}
_REWARDS = '''
def correct(prompts, completions, answer, **columns):
    """Whether the sum is in the text."""
    return [float(right in text) for right, text in zip(answer, completions)]


def brief(prompts, completions, **columns):
    """1 for an empty text, 0 for 60 characters or more."""
    return [max(0.0, 1 - len(text) / 60) for text in completions]
'''
_STEPS = 16
_SHARED = (
    "--model.path embedded --data.sources questions.jsonl --rollout.prompts_per_step 8 --rollout.sampling.n 4 "
    f"--rollout.sampling.max_new_tokens 24 --train.max_steps {_STEPS} --logging.samples_every 5 "
    "--reward.components [{function: rewards.py:correct}, {function: rewards.py:brief, weight: 0.3}]"
)
_ALGORITHMS = {
    "addition-grpo": "--algorithm grpo",
    "addition-ppo": "--algorithm ppo",
}
_PICTURES = {
    "runs": ("light", _SIZE, "runs"),
    "curves": ("dark", _SIZE, "curves?run={grpo}&run={ppo}&smooth=0.4"),
    "groups": ("light", _SIZE, "rollouts?run={grpo}&view=groups"),
    "tokens": ("light", _SIZE, f"sample?run={{ppo}}&step={_STEPS}&index=3&view=tokens&place={{place}}"),
    "preferences": ("light", _SIZE, "preferences?run={grpo}"),
    "phone": ("light", PHONE, "rollouts?run={ppo}"),
}


def main() -> None:
    _train()
    with served_board(FOLDER / "output") as board, browser_context() as context, checked_page(context) as page:
        _take(board, page)


def _train() -> None:
    """Train the runs that have not finished."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "rewards.py").write_text(_REWARDS)
    draw = random.Random(0)
    pairs = [(draw.randint(2, 20), draw.randint(2, 20)) for _ in range(600)]
    write_lines(FOLDER / "questions.jsonl", [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs])
    for name, words in _ALGORITHMS.items():
        folder = FOLDER / "output" / name
        if not (folder / FINISHED_FILE).exists():
            options = _words(f"{words} {_SHARED} --output_dir {folder} --resume auto")
            subprocess.run(
                [sys.executable, "-m", "hybrid_rlhf", "rl", *options], check=True, cwd=FOLDER, env=ENVIRONMENT
            )


def _words(text: str) -> list[str]:
    """The words of options, whose values may have spaces."""
    return [word for option in text.split("--")[1:] for word in (f"--{option.strip()}").split(" ", 1)]


def _take(board: ServedBoard, page: Any) -> None:
    IMAGES.mkdir(exist_ok=True)
    ids = {name: board.run(f"addition-{name}")["id"] for name in ("grpo", "ppo")}
    tokens = board.get(f"/api/runs/{ids['ppo']}/samples/{_STEPS}/3")["tokens"]
    ids["place"] = len(tokens["ids"]) - 4  # a sampled one
    for name, (scheme, size, address) in _PICTURES.items():
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        show(page, board.url, address.format(**ids))
        page.wait_for_timeout(700)  # charts are drawn in frames after their data has come
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(_COLOURS).save(IMAGES / f"board_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
