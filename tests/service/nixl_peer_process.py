"""A peer whose pool tests read; `python -m tests.service.nixl_peer_process NAME SEED`.

It prints one line, base64 of msgpack of (metadata, pool), and lives until its standard input
closes.
"""

from __future__ import annotations

import base64
import sys
from queue import SimpleQueue

import msgspec

from tandem.transfer.reads import messages as transfer
from tandem.transfer.thread import TransferThread
from tests.service.nixl_harness import DEADLINE_S, local_pool, transfer_config
from tests.service.transfer_pools import contents


def main() -> None:
    name = sys.argv[1]
    seed = int(sys.argv[2])
    memory = contents(seed)
    answers: SimpleQueue[transfer.TransferEvent] = SimpleQueue()
    thread = TransferThread(local_pool(memory), transfer_config(), name, answers.put)
    thread.start()
    thread.producer(1)
    ready = answers.get(timeout=DEADLINE_S)
    assert isinstance(ready, transfer.ProducerReady)
    line = base64.b64encode(msgspec.msgpack.encode((ready.metadata, ready.pool)))
    print(line.decode(), flush=True)
    sys.stdin.read()
    thread.stop()


if __name__ == "__main__":
    main()
