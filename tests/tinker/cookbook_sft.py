"""The cookbook's supervised training loop, unmodified, on two sequences. Run in its environment: MODEL LOG_FOLDER."""

from __future__ import annotations

import asyncio
import sys

import chz
import tinker
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from two_adapters import SEQUENCE, sft


class Sequences(SupervisedDataset):
    def get_batch(self, index: int) -> list[tinker.Datum]:
        return [sft(SEQUENCE), sft(SEQUENCE[::-1])]

    def set_epoch(self, seed: int = 0) -> None:
        pass

    def __len__(self) -> int:
        return 10


@chz.chz
class Builder(SupervisedDatasetBuilder):
    def __call__(self) -> tuple[SupervisedDataset, None]:
        return Sequences(), None


if __name__ == "__main__":
    config = train.Config(
        log_path=sys.argv[2],
        model_name=sys.argv[1],
        recipe_name="test",
        dataset_builder=Builder(),
        learning_rate=2e-2,
        lr_schedule="constant",
        lora_rank=4,
        save_every=4,
        eval_every=0,
    )
    asyncio.run(train.main(config))
