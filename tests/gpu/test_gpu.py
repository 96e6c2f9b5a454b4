"""What only a GPU can show: the three dtypes under ZeRO, the switch, and generation against Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.generation import GenerationEngine
from tests.engines.ranks import run_ranks
from tests.engines.test_engines import life
from tests.generation.test_engine import GREEDY, PROMPTS
from tests.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_lives_on_a_gpu(dtype: str, stage: int, model_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stage": stage, "dtype": dtype, "lora": 4, "lr": 0.1}
    (result,) = run_ranks(life, 1, tmp_path / "r", model_folder, tmp_path / "m", settings)
    assert result["losses"][2] < result["losses"][0]
    assert result["same"] and result["released"]


def test_greedy_tokens_are_those_of_hugging_face_on_a_gpu() -> None:
    model = tiny_model().cuda()
    engine = GenerationEngine(model)
    for prompt, (completion,) in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == whole[0, len(prompt) :].tolist()
