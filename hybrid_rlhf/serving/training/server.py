"""The process of a training server: its folder, its socket, and its end.

The board shows the folder (`record.py`). SIGINT and SIGTERM stop the server as they stop `serve`: it refuses new
requests and finishes what runs on the device. Unsaved state is lost; clients receive the same error as after a kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import TrainServerConfig
from hybrid_rlhf.models.pretrained.adapters import stored_adapter
from hybrid_rlhf.runtime.files.folder_lock import FolderLock
from hybrid_rlhf.runtime.files.reading import user_path
from hybrid_rlhf.serving.admission import Activity
from hybrid_rlhf.serving.server import StoppingServer
from hybrid_rlhf.serving.training.app import build_app
from hybrid_rlhf.serving.training.base import LoadedBase
from hybrid_rlhf.serving.training.record import ServiceRecord, write_settings
from hybrid_rlhf.serving.training.service import TrainingService
from hybrid_rlhf.serving.training.store import Checkpoint, Store
from hybrid_rlhf.serving.training.tenants import Quotas, Tenants
from hybrid_rlhf.serving.web import bound_socket

SERVER_RUN = "server"
"""Run of the adapters that the operator of a server gives to all."""
_MIB = 2**20
_GIB = 2**30


def serve_training(
    config: TrainServerConfig,
    load: Callable[[Path], LoadedBase],
    api_keys: dict[str, str],
    *,
    report: Callable[[str], None],
) -> bool:
    """Serve until a signal; return False if the service has failed.

    Args:
        config: the settings.
        load: returns the model, which may keep files in the folder that it receives; called after the address is bound.
        api_keys: keys by the names of their tenants.
        report: receives the URL of the server when it accepts requests.

    Raises:
        UserError: when the address or the folder is in use, or the model does not fit.
    """
    folder = user_path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    owner = lock.acquire()
    if owner is not None:
        raise UserError(f"output_dir is for one server at a time, {folder} is in use by {owner}: choose another")
    listener = bound_socket(config.host, config.port)
    base = load(folder)
    service = training_service(config, base, folder, api_keys)
    write_settings(config, folder)
    record = ServiceRecord(folder, service.tenants, service.metrics)
    activity = Activity()
    app = build_app(service, host=config.host, activity=activity, max_body_bytes=int(config.max_body_mib * _MIB))

    def failed() -> bool:
        return app.state.failed or base.batch.failure is not None

    server = StoppingServer(
        app,
        activity,
        seconds=config.shutdown_seconds,
        failed=failed,
        started=report,
        close=base.batch.close,
        beside=record.follow,
    )
    try:
        server.run(sockets=[listener])
    finally:
        service.worker.close()
        base.batch.close()
        base.generation.close()
        lock.release()
    return not failed()


def training_service(
    config: TrainServerConfig, base: LoadedBase, folder: Path, api_keys: dict[str, str]
) -> TrainingService:
    """The service of a base model.

    Raises:
        UserError: for an adapter of the config that does not fit the base.
    """
    store = Store(folder, int(config.max_stored_gib * _GIB))
    quotas = Quotas(
        requests=config.max_requests,
        queued_bytes=int(config.max_queued_mib * _MIB),
        models=config.max_models,
    )
    for name, adapter in config.adapters.items():
        place = user_path(adapter)
        base.engine.load(SERVER_RUN, place)
        base.engine.remove(SERVER_RUN)
        rank = stored_adapter(str(place)).rank
        store.add(Checkpoint(SERVER_RUN, "weights", name, None, rank, 0, time.time(), 0, folder=place))
    return TrainingService(config, base, store, Tenants(api_keys, quotas))
