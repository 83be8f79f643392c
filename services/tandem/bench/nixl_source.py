"""A process whose pool the transfer bench reads over NIXL.

`python -m tandem.bench.nixl_source MODEL NUM_BLOCKS` prints one line, base64 of msgpack of
(metadata, pool), and lives until its standard input closes.
"""

from __future__ import annotations

import base64
import sys
from queue import SimpleQueue

import msgspec

from tandem.bench.pool import fill, pool_memory
from tandem.bench.sizes import layout_of
from tandem.config import TransferConfig
from tandem.transfer.protocol import LocalPool, layout_fields
from tandem.transfer.thread import SourceReady, TransferEvent, TransferThread

_DEADLINE_S = 30.0


def main() -> None:
    layout = layout_of(sys.argv[1], int(sys.argv[2]))
    memory = pool_memory(layout)
    fill(memory)
    pool = LocalPool(memory.ctypes.data, memory.nbytes, 0, "DRAM", layout_fields(layout))
    answers: SimpleQueue[TransferEvent] = SimpleQueue()
    thread = TransferThread(pool, TransferConfig(), "bench-source", answers.put)
    thread.start()
    thread.source(1)
    ready = answers.get(timeout=_DEADLINE_S)
    assert isinstance(ready, SourceReady)
    if ready.error:
        raise SystemExit(f"NIXL cannot serve blocks here: {ready.error}")
    line = base64.b64encode(msgspec.msgpack.encode((ready.metadata, ready.pool)))
    print(line.decode(), flush=True)
    sys.stdin.read()
    thread.stop()


if __name__ == "__main__":
    main()
