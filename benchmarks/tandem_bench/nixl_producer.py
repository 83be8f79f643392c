"""A process whose pool the transfer bench reads over NIXL.

`python -m tandem_bench.nixl_producer MODEL NUM_BLOCKS` prints one line, base64 of msgpack of
(metadata, pool), and lives until its standard input closes.
"""

from __future__ import annotations

import base64
import sys
from queue import SimpleQueue

import msgspec

from tandem.common.config.transfer import TransferConfig
from tandem.transfer.reads.messages import LocalPool, ProducerReady, TransferEvent
from tandem.transfer.thread import TransferThread
from tandem_bench.pool import fill, pool_memory
from tandem_bench.sizes import layout_of

_DEADLINE_S = 30.0


def main() -> None:
    layout = layout_of(sys.argv[1], int(sys.argv[2]))
    memory = pool_memory(layout)
    fill(memory)
    pool = LocalPool(memory.ctypes.data, memory.nbytes, 0, "DRAM", layout)
    answers: SimpleQueue[TransferEvent] = SimpleQueue()
    thread = TransferThread(pool, TransferConfig(), "bench-source", answers.put)
    thread.start()
    thread.producer(1)
    ready = answers.get(timeout=_DEADLINE_S)
    assert isinstance(ready, ProducerReady)
    if ready.error:
        raise SystemExit(f"NIXL cannot serve blocks here: {ready.error}")
    line = base64.b64encode(msgspec.msgpack.encode((ready.metadata, ready.pool)))
    print(line.decode(), flush=True)
    sys.stdin.read()
    thread.stop()


if __name__ == "__main__":
    main()
