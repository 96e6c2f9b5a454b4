"""Nothing of the environment reaches what a run writes or says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run_python, sft_line

SECRETS = {
    "HF_TOKEN": "hf_Ab3dEf6hIj9kLmNoPqRs",
    "WANDB_API_KEY": "wandb-5ecret",
    "AWS_SECRET_ACCESS_KEY": "aws-5ecret",
    "OPENAI_API_KEY": "sk-5ecret5ecret5ecret",
    "MY_PASSWORD": "pass-5ecret",
}


@pytest.mark.slow
def test_secrets_of_the_environment_stay_there(model_folder: Path, pair_rows: Path, tmp_path: Path) -> None:
    more = "--train.max_steps 2 --train.save_every 1 --logging.profile_steps [1] --logging.sinks tensorboard"
    done = run_python(sft_line(tmp_path / "out", model_folder, pair_rows, more), **SECRETS)
    assert done.returncode == 0, done.stderr[-3000:]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    written += [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "log.txt", "model.safetensors"} <= {path.name for path in written}
    for secret in SECRETS.values():
        assert secret not in done.stdout + done.stderr
        assert not [path for path in written if secret.encode() in path.read_bytes()]
