"""Models over HTTP, with OpenAI's API: the generation engine's open batch behind FastAPI and uvicorn.

Read `bodies.py` (what a request may say) and `conversations.py` (its messages), `service.py` (a request becomes
prompts, then tokens), `answers.py` (tokens become OpenAI's objects) with `text_stream.py` (their text, piece by piece),
`scores.py` (a reward model), `app.py` (routes, errors, access), `metrics.py` and `server.py` (the process);
`background.py` is a server inside another process, `episodes.py` what programs outside of a training run take from it.
FastAPI, uvicorn and prometheus-client are the extra `serve` (`packages.py`).
"""
