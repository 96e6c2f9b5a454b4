"""Converts published data formats to rows that every step reads.

Read `converting.py` (a source to a file; the list of formats), `records.py` (the results of a format), then the
formats: `dialogues.py` (HH-RLHF), `turns.py` (ShareGPT, Alpaca, OpenAI messages) with `tool_calls.py`, `scored.py`
(UltraFeedback, OpenAI's comparisons) and `trees.py` (OpenAssistant).
"""
