"""Saves the models of a run at its end."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.engines.partition import adapter_tensors, full_tensors
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.loop.model_card import model_card
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.lora import has_lora, write_adapter
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.files.atomic import write_whole
from hybrid_rlhf.runtime.files.disk import disk_errors_translated
from hybrid_rlhf.runtime.observability.formatting import format_duration
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import FINISHED_FILE, Run

ADAPTER_FOLDER = "adapter"


def save_engine(run: Run, name: str, engine: RoleModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a model of a run in a subfolder of the run; "" is the run's folder itself. The ranks with the model save.

    Adapters are merged into the model, and are also in its subfolder `adapter`, as peft writes them.
    """
    folder = run.folder / name
    run.watchdog.beat(f"save of {folder}")
    if not engine.world.is_member:
        return
    if engine.world.is_main:
        folder.mkdir(exist_ok=True)
    if engine.lm.can_generate() and (settings := engine.lm.generation_config) is not None:
        # Generation with the saved model must stop at the same tokens as rollouts.
        settings.eos_token_id = list(stop_token_ids(tokenizer, settings.eos_token_id))
    kinds = {"generates": engine.lm.can_generate(), "sees": images_refused(engine.lm.config) is None}
    run.flush()  # the card shows the last metrics
    with disk_errors_translated(run.folder):
        save_model(
            folder,
            full_tensors(engine.lm, engine.world),
            lm=engine.lm,
            tokenizer=tokenizer,
            world=engine.world,
            card=model_card(run, name, **kinds) if engine.world.is_main else None,
        )
        if has_lora(engine.lm):
            save_adapter(folder / ADAPTER_FOLDER, engine)


def save_adapter(folder: Path, engine: RoleModel) -> None:
    """Save the adapters of a model; every rank of the engine calls, its main rank writes."""
    tensors = adapter_tensors(engine.lm, engine.world)
    if engine.world.is_main:
        write_adapter(folder, tensors, lm=engine.lm)
    else:
        deque(tensors, maxlen=0)
    engine.world.barrier()


def finish(run: Run, folders: Mapping[str, RoleModel], tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the models of a run by subfolder, then mark the run as finished. Every rank calls."""
    for name, engine in folders.items():
        save_engine(run, name, engine, tokenizer)
    run.world.barrier()
    if run.world.is_main:
        write_whole(run.folder / FINISHED_FILE, json.dumps({"models": list(folders)}) + "\n")
        saved = ", ".join(f"{name or 'model'} in {run.folder / name}" for name in folders)
        logger.info("finished in %s: %s", format_duration(time.monotonic() - run.started), saved)
    run.world.barrier()
