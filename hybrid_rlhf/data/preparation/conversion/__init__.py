"""Published data formats to rows that every step reads.

Read `converting.py` (a source to a file; which formats there are), `records.py` (what a format makes of a row), then
the formats: `dialogues.py` (HH-RLHF), `turns.py` (ShareGPT, Alpaca, OpenAI messages) with `tool_calls.py`, `scored.py`
(UltraFeedback, OpenAI's comparisons) and `trees.py` (OpenAssistant).
"""
