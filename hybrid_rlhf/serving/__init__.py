"""Models over HTTP, with OpenAI's API: the generation engine's open batch behind FastAPI and uvicorn.

Read `bodies.py` (the keys of a request) and `conversations.py` (its messages), `service.py` (from a request to prompts
and tokens), `answers.py` (from tokens to OpenAI's objects) with `text_stream.py` (their text, piece by piece),
`scores.py` (a reward model), `app.py` (routes, errors, access), `metrics.py` and `server.py` (the process);
`web.py` has what all servers share, the board among them, `episodes.py` serves episodes to programs outside of a run.
FastAPI, uvicorn and prometheus-client are the extra `serve` (`packages.py`).
"""
