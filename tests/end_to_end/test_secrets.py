"""Nothing of the environment reaches what a run writes or says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRETS = {
    "HF_TOKEN": "hf_Ab3dEf6hIj9kLmNoPqRs",
    "WANDB_API_KEY": "wandb-5ecret",
    "AWS_SECRET_ACCESS_KEY": "aws-5ecret",
    "OPENAI_API_KEY": "sk-5ecret5ecret5ecret",
    "MY_PASSWORD": "pass-5ecret",
}


@pytest.mark.slow
def test_secrets_of_the_environment_stay_there(model_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) + "\n" for i in range(12)))
    line = [
        "training/step1_sft/main.py",
        "--model.path",
        str(model_folder),
        "--data.sources",
        str(rows),
        "--output_dir",
        str(tmp_path / "out"),
        "--train.global_batch_size",
        "4",
        "--train.max_steps",
        "2",
        "--train.save_every",
        "1",
        "--data.max_length",
        "64",
        "--data.cache_dir",
        str(tmp_path / "cache"),
        "--logging.profile_steps",
        "[1]",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **SECRETS}
    done = subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    written += [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "log.txt", "model.safetensors"} <= {path.name for path in written}
    for secret in SECRETS.values():
        assert secret not in done.stdout + done.stderr
        assert not [path for path in written if secret.encode() in path.read_bytes()]
