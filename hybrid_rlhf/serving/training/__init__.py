"""A training service with Tinker's API: many adapters of one base, trained and sampled by many clients at once.

Read `service.py` (what the routes do, and the task that feeds the engine), then `queue.py` (which commands run next)
with `tenants.py` (keys, quotas, whose turn it is), `futures.py` (results that clients poll for), `losses.py`,
`sampling.py`, `store.py` (what is on disk) and `merging.py`; `app.py` has the routes, `bodies.py` their JSON and
`messages.py` their protobuf, `metrics.py` the counts, `server.py` the process. `trainer.py` is what the service needs
of engines/adapters.
Its packages are those of the extra `serve` (serving/packages.py), and protobuf and pyarrow, which every installation
has.
"""
