"""Settings that the I/O process hands the engine process at its start, on standard input."""

import msgspec

from tandem.config import EngineConfig, TransferConfig


class EngineSettings(msgspec.Struct, frozen=True):
    worker_id: str
    epoch: str
    engine: EngineConfig
    transfer: TransferConfig
    commands_address: str
    transfers_address: str
    cores: list[int]
    parent_pid: int  # of the I/O process: the engine process ends with it
    pool_fd: int | None = None  # a memfd for the KV pool, which the I/O process maps, too
