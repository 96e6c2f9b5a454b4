"""What a run needs and where it goes: memory of a step, its time, and the placement of the roles of RL.

Memory: `device.py` (ranks on hosts, and their memory), `phase_memory.py` (a phase of a step on a rank), `shapes.py` and
`live_bytes.py` (a batch on the meta device), `engine_memory.py`, `inference_memory.py` and `generation_memory.py` (the
parts), `placed_memory.py` (all ranks of an RL step), `step_memory.py` (any step); `memory_table.py`, `remedies.py`,
`out_of_memory.py` and `room.py` use them.
Time: `job.py` (what a step computes), `curves.py` (how fast a machine is, from `machines/`), `costs/` (seconds of each
piece of work) and `step_time.py` (their sum).
Placements: `plans.py` (what is chosen), `candidates.py` and `search.py` (the best plan), `placement_table.py` (the
answer), `automatic.py` (`placement: auto`), `prediction_errors.py`. `dotted_keys.py` and `memo.py` are helpers.
"""
