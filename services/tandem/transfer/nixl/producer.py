"""The producer side of NIXL: an agent through which peers read this process's pool."""

from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.ucx_mode import UcxMode
from tandem.transfer.reads.messages import LocalPool

PROGRESS_DELAY_US = 500_000


def readable_agent(
    pool: LocalPool, name: str, mode: UcxMode | None, *, with_cuda_ipc: bool = True
) -> NixlAgent:
    """Creates an agent through which peers can read the pool. Raises Incompatible without NIXL.

    The agent lives as long as the process. The agent's metadata gives read access to the whole
    pool, so only authenticated workers of the same cluster get the metadata. The pool's memory may
    be freed once the agent is closed.

    The agent has a progress thread. The thread is needed when a peer connects, and over TCP also
    for each read, because no hardware reads the memory. The thread sleeps in poll(2) until one of
    UCX's file descriptors wakes it, at most for the delay `PROGRESS_DELAY_US`. The table shows how
    the delay affects an idle process and reads, measured on 2 cores:

        delay of the thread                   1,000 us  10,000 us  100,000 us  1,000,000 us
        CPU time of an idle process              3.7 %      0.3 %       0.0 %         0.0 %
        speed over CMA, 64 blocks of 360 KiB  5.2 GB/s   5.8 GB/s    6.0 GB/s      5.6 GB/s
        speed over TCP, 64 blocks of 360 KiB  2.2 GB/s   2.0 GB/s    1.5 GB/s      2.1 GB/s
        duration over TCP, one block            1.2 ms     1.0 ms      0.9 ms        1.0 ms

    Over TCP, a lost consumer can crash a producer. UCX 1.23 answers TCP reads in software. If it
    still has reads to answer on a connection that is lost, it aborts the process
    ("ucp_request.inl: Fatal: unexpected error"). When consumers were killed during a read, 1 of 15
    kills crashed the producer. If the producer was stopped (SIGSTOP) during the kill, every kill
    crashed it. Shared memory does not have this problem. A cancelled pull does not cause it either,
    because the reads of the pull run to their end.
    """
    agent = NixlAgent(
        name,
        mode=mode,
        progress_delay_us=PROGRESS_DELAY_US,
        memory=pool.memory,
        with_cuda_ipc=with_cuda_ipc,
    )
    agent.register(
        address=pool.address, num_bytes=pool.num_bytes, device_id=pool.device_id, memory=pool.memory
    )
    return agent
