"""A local web server over run folders: curves, rollouts token by token, preferences, chat, start and stop of runs.

Read `server.py` (the process), `serving/access.py` (who may ask), `routes/` (the
API, one file per subject), then what answers it: `runs/`, `samples/`, `signals.py`, `preferences.py`, `chat.py`,
`processes/`. `events.py` watches the files. It only reads run folders, besides an index of samples (`samples/`), and
imports no torch before a chat; everything that computes is a command in a process of its own. `static/` is the page.
"""
