"""A peer whose pool tests read: block `i` is filled with bytes that `block_bytes_of` tells.

It prints one msgpack line (metadata and pool) and lives until its standard input closes.
"""

from __future__ import annotations

import base64
import sys
from queue import SimpleQueue

import msgspec
import numpy as np

from services.config import TransferConfig
from services.engine.layout import BlockLayout
from services.transfer import thread as transfer
from services.transfer.protocol import LocalPool, layout_fields


def local_pool(memory: np.ndarray, layout: BlockLayout) -> LocalPool:
    return LocalPool(
        address=memory.ctypes.data,
        num_bytes=memory.nbytes,
        device_id=0,
        memory="DRAM",
        layout=layout_fields(layout),
    )


def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[2])
    layout = BlockLayout(*msgspec.json.decode(sys.argv[3]))
    memory = np.random.default_rng(seed).integers(0, 256, layout.pool_bytes, dtype=np.uint8)
    answers: SimpleQueue[transfer.TransferEvent] = SimpleQueue()
    thread = transfer.TransferThread(
        local_pool(memory, layout), TransferConfig(), name, answers.put
    )
    thread.start()
    thread.source(1)
    ready = answers.get(timeout=20)
    assert isinstance(ready, transfer.SourceReady)
    print(base64.b64encode(msgspec.msgpack.encode([ready.metadata, ready.pool])).decode())
    sys.stdout.flush()
    sys.stdin.read()
    thread.stop()


if __name__ == "__main__":
    main()
