"""Where the roles of RL live, planned before a run: the time and the memory of a step under each placement.

Read `job.py` (what a step computes), `curves.py` (how fast a machine is) and `plans.py` (what is chosen), then
`costs/` (seconds of each piece of work), `schedule.py` and `simulation.py` (the pieces as events on ranks),
`memory.py` (what each rank holds), `candidates.py` and `search.py` (the best plan) and `tables.py` (the answer).
Curves come from `machines/`; `report.py` compares predictions with measurements.
"""
