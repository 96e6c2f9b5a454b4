"""The report of a run: report.html for people and report.json for programs, from the files of the run folder.

Read `writing.py`, then `content.py` (what is in it), `memory.py` (next to the plan), `samples.py`, `environment.py` and
`charts.py` (curves as SVG). `pipeline.py` writes the page of `hybrid-rlhf train` that links the reports of its steps.
"""
