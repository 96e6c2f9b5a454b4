"""DeepSpeed engines: training, weight sync to inference weights, checkpoints. The only package that imports deepspeed.

Read `engine.py` (train one model), `hybrid.py` (the actor, which also generates), `builder.py` and `ds_config.py`
(config sections to engines), `partition.py` (full weights from ZeRO-3), `weight_check.py` (after each weight sync),
`saved/` (checkpoints to resume from), `averaging.py` and `residency/` (what is on the device in each phase);
`role_model.py` (the interface of a role's model, also on ranks that do not have it), `sampling_engine.py` (that of an
engine that samples) and `separate/` (inference weights on ranks without a training model); `adapters/` (many adapters
of one base, without DeepSpeed). Private members of DeepSpeed are used only in `deepspeed_internals.py`.
"""

from __future__ import annotations

import sys


class _AutotunerWithoutMlflow:
    """Import hook: DeepSpeed's autotuner, which no run uses, imports mlflow where it is installed, which is a quarter
    of the processor time in which a rank starts."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        autotuner = sys.modules.get("deepspeed.autotuning.autotuner")
        if name == "mlflow" and autotuner is not None and not hasattr(autotuner, "has_mlflow"):
            raise ModuleNotFoundError(f"{autotuner.__name__} needs no mlflow")


sys.meta_path.insert(0, _AutotunerWithoutMlflow)
