"""The report of a run: report.html for people and report.json for programs, from the files of the run folder.

Read `writing.py`, then `content.py` (the content), `memory.py` (memory beside the plan), `samples.py` and
`charts.py` (curves as SVG). `pipeline.py` writes the page of `hybrid-rlhf train` that links its steps' reports.
"""
