"""Memory and time of a run before it starts, and the placement of the roles of RL.

Memory: `device.py` (ranks on hosts, and their memory), `phase_memory.py` (a phase of a step on a rank), `shapes.py` and
`live_bytes.py` (a batch on the meta device), `engine_memory.py`, `inference_memory.py` and `generation_memory.py` (the
parts), `placed_memory.py` (all ranks of an RL step), `step_memory.py` (any step); `memory_table.py`, `remedies.py`,
`out_of_memory.py` and `room.py` use them.
Time: `job.py` (the work of a step), `machine.py` (five numbers of a machine), `calibration.py` and `stored.py` (how
they are measured and kept), and `step_time.py` (the roofline).
Placements: `plans.py` (what is chosen), `search.py` (the best plan), `placement_table.py` (the answer) and
`automatic.py` (`placement: auto`). `dotted_keys.py` and `memo.py` are helpers.
"""
