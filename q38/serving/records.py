"""PID files: which servers this user runs. One JSON file per port in the state directory."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from q38.base import settings
from q38.base.errors import InputError, Q38Error, ResourceError
from q38.checkpoint.writer import write_json, writing
from q38.serving.child import STOP_GRACE_S, kill_group, wait_for_exit


@dataclass(frozen=True)
class Record:
    """One server. `started` is the process's start time (s since the epoch), which tells it from a later
    process that got the same id. `model` is the name in the API."""

    port: int
    pid: int
    started: float
    state: str  # "starting" or "ready"
    url: str
    engine: str
    model: str
    directory: str
    log: str

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False


def write_record(record: Record) -> None:
    """Write or replace the PID file of a port."""
    file = _file(record.port)
    with writing(file):
        # Logs quote prompts: for this user only.
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(file, asdict(record))


def remove_record(record: Record) -> None:
    """Remove the PID file, unless another server has replaced it."""
    if read_record(record.port, stale=True) in (None, record):
        _file(record.port).unlink(missing_ok=True)
        control_socket(record.port).unlink(missing_ok=True)


def read_record(port: int, *, stale: bool = False) -> Record | None:
    """The running server on a port; with `stale` also one whose process is gone."""
    try:
        record = Record(**json.loads(_file(port).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if stale or record.alive else None


def running() -> list[Record]:
    """All running servers of this user, by port."""
    names = [f.stem.removeprefix("serve-") for f in settings.load().state_dir.glob("serve-*.json")]
    ports = [int(name) for name in names if name.isdigit()]
    return [record for port in sorted(ports) if (record := read_record(port)) is not None]


def stop(port: int | None = None, *, grace_s: float = STOP_GRACE_S) -> Record:
    """Stop the server on `port`, or the only one that runs.

    Raises:
        ResourceError: none runs (there).
        InputError: several run and no port is given.
    """
    records = running() if port is None else [r for r in [read_record(port)] if r is not None]
    if not records:
        where = "" if port is None else f" on port {port}"
        raise ResourceError(f"no q38 server runs{where}", remedy="see q38 serve status")
    if len(records) > 1:
        ports = ", ".join(str(r.port) for r in records)
        raise InputError(
            f"{len(records)} servers run (ports {ports})", where="--port", remedy="say which one to stop"
        )
    record = records[0]
    os.kill(record.pid, signal.SIGTERM)
    if not wait_for_exit(record.pid, grace_s):
        kill_group(record.pid)
        if not wait_for_exit(record.pid, grace_s):
            raise Q38Error(f"process {record.pid} does not end", remedy="look at it with ps")
    remove_record(record)
    return record


def control_socket(port: int) -> Path:
    """Where the process with the model takes changes of its expert rows (the sglang engine)."""
    return _file(port).with_suffix(".sock")


def default_log(port: int) -> Path:
    """Where the log of a port goes unless --log says otherwise."""
    return settings.load().state_dir / f"serve-{port}.log"


def _file(port: int) -> Path:
    return settings.load().state_dir / f"serve-{port}.json"
