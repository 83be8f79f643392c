"""The readable side of NIXL: this process's pool, opened to whom the metadata is given."""

from tandem.transfer.nixl.agent import NixlAgent
from tandem.transfer.nixl.messages import LocalPool
from tandem.transfer.nixl.ucx_mode import UcxMode

PROGRESS_DELAY_US = 100_000


def readable_agent(pool: LocalPool, name: str, mode: UcxMode | None) -> NixlAgent:
    """Makes an agent with the pool registered. Raises Incompatible when NIXL is missing.

    It lives as long as the process: peers hold its metadata, which opens the whole pool and is for
    authenticated workers of the same cluster only. Once it is closed the pool's memory may go.

    Readers need its progress thread to join and, on transports without hardware reads (TCP), for
    each read. It sleeps in poll(2) on UCX's descriptors; the delay only bounds how late it is when
    one of these fails to wake it. Measured on 2 cores; GB/s of 64 scattered blocks of 360 KiB when
    warm, noise included:

        delay in us      1,000    10,000    100,000    1,000,000
        idle CPU         3.7 %     0.3 %      0.0 %        0.0 %
        CMA                5.2       5.8        6.0          5.6
        UCX_TLS=tcp        2.2       2.0        1.5          2.1
        one block, tcp  1.2 ms    1.0 ms     0.9 ms       1.0 ms

    Over TCP a producer can die of its consumers: UCX 1.23 answers reads in software there, and
    aborts the process ("ucp_request.inl: Fatal: unexpected error") when more of them are to be
    answered on a connection that was lost. Seen for 1 of 15 consumers killed in mid-read, and
    always for one that went while the producer stood still. Never seen with shared memory; a
    cancelled pull does not do it, because its reads are left to end.
    """
    agent = NixlAgent(name, mode=mode, progress_delay_us=PROGRESS_DELAY_US, memory=pool.memory)
    agent.register(
        address=pool.address, num_bytes=pool.num_bytes, device_id=pool.device_id, memory=pool.memory
    )
    return agent
