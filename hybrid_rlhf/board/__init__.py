"""A local web server over run folders: curves, rollouts token by token, preferences, chat, start and stop of runs.

Read `server.py` (the process), `serving/web.py` (access rules), `routes/` (the API, one file per subject), then the
parts behind it: `runs/`, `samples/`, `signals.py`, `preferences.py`, `chat.py`, `processes/`. `events.py` watches the
files. The board only reads run folders and keeps an index of samples (`samples/`). It imports torch only for a chat;
every other computation is a command in a separate process. `static/` is the page.
"""
