"""Models over HTTP, with OpenAI's API: the generation engine's open batch behind FastAPI and uvicorn.

Read `bodies.py` (the keys of a request) and `conversations.py` (its messages), `service.py` (from a request to prompts
and tokens), `answers.py` (from tokens to OpenAI's objects) with `text_stream.py` (their text, piece by piece),
`formats.py` (the grammar of an answer), `responses.py` (OpenAI's Responses API), `scores.py` (a reward model),
`updates.py` (adapters and weights that change) with `followed_run.py` (the checkpoints of a run), `app.py` (routes,
errors, access), `metrics.py`, `tracing.py` and `server.py` (the process); `web.py` has what all servers share, the
board among them, `episodes.py` serves episodes to programs outside of a run.
FastAPI, uvicorn, prometheus-client and llguidance are the extra `serve` (`packages.py`).
"""
