"""Memory of a run: estimated before it starts, reported, and explained when it is exhausted.

Read `plan.py` (phases of a step), `engine.py` and `generation.py` (memory of an engine and of generation), `shapes.py`
and `live_bytes.py` (measured on the meta device), `report.py` (the table of `--plan`), `remedies.py` (settings that
reduce memory), `out_of_memory.py` (the error) and `kept_weights.py` (whether inference weights stay between rollouts).
"""
