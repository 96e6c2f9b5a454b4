"""A training service with Tinker's API: many adapters of one base, trained and sampled by many clients at once.

Read `service.py` (what clients ask for), then what owns it: `sessions.py` (the clients), `queue.py` (models and their
commands in order), `worker.py` (the task that feeds the engine) with `states.py` (what commands do), `rows.py` and
`losses.py` (what a training command computes), `sampling.py` (sampling requests and resident weights), `store.py`
(runs, checkpoints and records on disk), `futures.py` (results that clients poll for), `tenants.py` (keys, quotas, whose
turn it is). `app.py` has the application, `routes.py` and `checkpoints.py` its routes, `requests.py`
what a request carries, `bodies.py` its JSON and `messages.py` its protobuf; `metrics.py` the counts, `record.py` the
lines for the board, `server.py` the process. `base.py` is what the service needs of engines/adapters.
Its packages are those of the extra `serve` (serving/packages.py), and protobuf and pyarrow, which every installation
has.
"""
