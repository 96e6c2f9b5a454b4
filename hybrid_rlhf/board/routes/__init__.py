"""The API of the board, one file per subject; docs/board.md specifies it.

Read `app.py` (the application and its errors), `access.py` (access rules), `answers.py` (JSON), then any subject.
"""
