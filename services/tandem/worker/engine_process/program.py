"""Starts the program of the engine process, which then waits for its settings.

The program needs most of its start for imports. A worker therefore starts it before it imports its
own modules.
"""

import asyncio
import sys
from dataclasses import dataclass

from tandem.engine.cache.layout.pool_memory import create_shared

ENGINE_MODULE = "tandem.worker.engine_process"


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """A running engine process. It reads its settings (`messages.EngineSettings`) from standard
    input, and ends if there are none."""

    process: asyncio.subprocess.Process
    pool_fd: int | None  # memfd for the KV pool; None if the system has no memfd


async def start_program(module: str = ENGINE_MODULE) -> EngineProgram:
    """Starts a Python module as the engine process. Tests and benchmarks have modules of their
    own."""
    pool_fd = create_shared()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=() if pool_fd is None else (pool_fd,),
    )
    return EngineProgram(process, pool_fd)
