"""Pretraining text that is mixed into the actor's updates (InstructGPT's PPO-ptx); its position can be saved."""

from __future__ import annotations

from dataclasses import replace

from datasets import Dataset

from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.collation import TokenBatch, collate_tokens, images_of
from hybrid_rlhf.data.loaders import BatchLoader
from hybrid_rlhf.runtime.world import World


class PtxBatches:
    """This rank's micro-batches of text without end, one list per update; `next` takes it."""

    def __init__(
        self,
        rows: Dataset,
        *,
        global_batch_size: int,
        micro_batches: MicroBatches,
        seed: int,
        pad_token_id: int,
        world: World,
        has_images: bool = False,
    ) -> None:
        self.loader = BatchLoader(
            rows,
            global_batch_size=global_batch_size,
            world_rank=world.rank,
            world_size=world.size,
            micro_batches=micro_batches,
            seed=seed,
            size_key="the batch size",
        )
        """Its state is the position, which is restored before the first batch is taken."""
        self._parts = self.loader.iterate()
        self._pad_token_id = pad_token_id
        self._has_images = has_images

    def __next__(self) -> list[TokenBatch]:
        """Return the micro-batches of the next update."""
        batches = [(part, collate_tokens(part, self._pad_token_id)) for part in next(self._parts)]
        return [replace(batch, images=images_of(part)) if self._has_images else batch for part, batch in batches]
