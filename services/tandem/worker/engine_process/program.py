"""Starts the program of the engine process, which then waits for its settings.

Most of the program's start is spent on imports. So the I/O process starts the engine process first,
and the two processes import their modules at the same time.
"""

import asyncio
import sys
from dataclasses import dataclass

from tandem.engine.cache.layout.pool_memory import create_shared

ENGINE_MODULE = "tandem.worker.engine_process"


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """A running engine process. It waits for its settings (`messages.EngineSettings`) on standard
    input. If standard input is closed without settings, the process ends."""

    process: asyncio.subprocess.Process
    pool_fd: int | None  # memfd for the KV pool; None if the system has no memfd


async def start_program(module: str = ENGINE_MODULE) -> EngineProgram:
    """Runs a Python module as the engine process. Tests and benchmarks use modules of their
    own."""
    pool_fd = create_shared()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=() if pool_fd is None else (pool_fd,),
    )
    return EngineProgram(process, pool_fd)
