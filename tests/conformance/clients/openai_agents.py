"""OpenAI's agents for Python; `agent_loop.py` says what a loop is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agents import (
    Agent,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

set_tracing_disabled(True)
set_default_openai_api(os.environ["API"])  # type: ignore[arg-type]
_FILE = Path(os.environ["FILE"])


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    return _FILE.read_text()


@function_tool
def edit_file(path: str, old: str, new: str) -> str:
    """Replaces a text in a file."""
    _FILE.write_text(_FILE.read_text().replace(old, new))
    return "done"


async def main() -> None:
    """Asks both questions in one session."""
    agent = Agent("Editor", model=os.environ["MODEL"], tools=[read_file, edit_file])
    session = SQLiteSession("session")
    for name in ("FIRST", "SECOND"):
        result = Runner.run_streamed(agent, os.environ[name], session=session)
        async for _ in result.stream_events():
            pass
        print(result.final_output)


asyncio.run(main())
