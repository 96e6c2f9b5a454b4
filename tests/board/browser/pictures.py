"""Writes the pictures of docs/board.md: `python -m tests.board.browser.pictures`; their numbers are made up.

It needs a browser, and Pillow (extra bench).
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.board import ServedBoard, served_board
from tests.support.browser import PHONE, browser_context, checked_page, show
from tests.support.runs import ROOT
from tests.support.showcase import write_showcase

IMAGES = ROOT / "docs" / "images"
_COLOURS = 128
"""Of a picture: a third of its bytes, and no difference that is seen."""
_SIZE = {"width": 1280, "height": 760}
_PICTURES = {
    "runs": ("light", _SIZE, "runs"),
    "curves": ("dark", _SIZE, "curves?run={grpo}&run={second}&run={third}&run={ppo}&smooth=0.6"),
    "groups": ("light", _SIZE, "rollouts?run={grpo}&view=groups"),
    "tokens": ("light", _SIZE, "sample?run={grpo}&step=60&index=3&view=tokens&place=61"),
    "signals": ("dark", _SIZE, "signals?run={ppo}"),
    "preferences": ("light", _SIZE, "preferences?run={grpo}"),
    "phone": ("light", PHONE, "rollouts?run={ppo}"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = write_showcase(Path(folder) / "output")
        with served_board(runs) as board, browser_context() as context, checked_page(context) as page:
            _take(board, page)


def _take(board: ServedBoard, page: Any) -> None:
    IMAGES.mkdir(exist_ok=True)
    ids = {name: board.run(f"gsm-grpo-seed{seed}")["id"] for seed, name in ((1, "grpo"), (2, "second"), (3, "third"))}
    ids["ppo"] = board.run("gsm-ppo")["id"]
    for name, (scheme, size, address) in _PICTURES.items():
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        show(page, board.url, address.format(**ids))
        page.wait_for_timeout(700)  # charts are drawn in frames after their data has come
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(_COLOURS).save(IMAGES / f"board_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
