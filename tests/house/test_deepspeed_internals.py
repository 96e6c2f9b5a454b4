"""DeepSpeed's private members are used in one file, so that a new version of DeepSpeed is checked there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "hybrid_rlhf"
INTERNALS = LIBRARY / "engines" / "deepspeed_internals.py"
UNDOCUMENTED = re.compile(
    r"\b(ds_(id|numel|shape|status|tensor|persist)|_hp_mapping|\w*(fp16|bf16|bit16|fp32)\w*_groups\w*|fp32_groups\w*"
    r"|grad_position|get_param_id|parameter_offload|setup_zero_stage3_hooks|checkpoint_event_\w+|update_lp_params"
    r"|swap_optimizer|loss_scaler|loss_scale_config|cur_scale|clip_fp32_gradients|buffered_allreduce_fallback"
    r"|micro_steps|global_samples|__compatible_ops__|ZeroParamStatus|partition_parameters)\b"
)
"""Members that DeepSpeed's documentation does not name."""


def test_undocumented_members_of_deepspeed_are_in_one_file() -> None:
    for path in sorted(LIBRARY.rglob("*.py")):
        found = {match.group() for match in UNDOCUMENTED.finditer(path.read_text())}
        if path == INTERNALS:
            assert {"ds_tensor", "_hp_mapping", "fp32_partitioned_groups_flat"} <= found, "the pattern matches nothing"
        else:
            assert not found, (str(path), found)


def test_engines_reach_into_no_private_member_of_another_object() -> None:
    """In engines/ `a._b` is allowed of self alone; what begins with `_` elsewhere is likely DeepSpeed's."""
    for path in sorted((LIBRARY / "engines").glob("*.py")):
        private = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ]
        if path == INTERNALS:
            assert "parameter._hp_mapping" in private
        else:
            assert [name for name in private if name not in ("schedule._step_count", "schedule._last_lr")] == [], path
