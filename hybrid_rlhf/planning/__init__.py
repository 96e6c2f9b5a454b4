"""What a run needs and where it goes: memory of a step, its time, and the placement of the roles of RL.

Memory: `phase_memory.py` (the device of a rank, a phase of a step), `shapes.py` with `live_bytes.py` (a batch, measured
on the meta device), `engine_memory.py`, `inference_memory.py` and `generation_memory.py` (the parts),
`placed_memory.py` (every rank of an RL step) and `step_memory.py` (any step). `memory_table.py` prints it,
`remedies.py` finds settings that fit, `out_of_memory.py` explains an error, `room.py` decides before a run.

Time: `job.py` (what a step computes), `curves.py` (how fast a machine is, from `machines/`), `costs/` (seconds of each
piece of work) and `step_time.py` (their sum). `dotted_keys.py` and `memo.py` (values computed once) serve all.

Placements: `plans.py` (what is chosen), `candidates.py` and `search.py` (the best plan), `placement_table.py` (the
answer), `automatic.py` (`placement: auto`) and `prediction_errors.py` (predictions next to measurements).
"""
