"""Runs Lua scripts in Redis. A call sends only the digest of a script. If the server no longer has
the script, the client loads the script into the server and calls again. All keys of one call must
share a hash slot.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from typing import Any

from redis.asyncio import RedisCluster
from redis.exceptions import NoScriptError

from tandem.net.store.client import Client

Argument = bytes | str | int


class Script:
    """A Lua script. All keys of one call must share a hash tag."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: Client, keys: Sequence[str], *args: Argument) -> Any:
        """Runs the script and returns its reply. If the server no longer has the script, the call
        takes two more round trips."""
        try:
            return await redis.evalsha(self._digest, len(keys), *keys, *args)
        except NoScriptError:
            await self.load(redis)
            return await redis.evalsha(self._digest, len(keys), *keys, *args)

    async def load(self, redis: Client) -> None:
        """Loads the script into the server. On a Redis Cluster, loads it into every primary."""
        await redis.script_load(self._text)

    async def on_each(self, redis: Client, keys: Sequence[str], *args: Argument) -> list[Any]:
        """Runs the script once for each key, in one round trip. Returns one reply for each key."""
        if len(keys) == 1:  # a call without a pipeline is 30 us faster
            return [await self(redis, keys, *args)]
        if isinstance(redis, RedisCluster):  # the keys may be on several servers
            return list(await asyncio.gather(*(self(redis, [key], *args) for key in keys)))
        for attempt in (1, 2):
            async with redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.evalsha(self._digest, 1, key, *args)
                try:
                    return list(await pipe.execute())
                except NoScriptError:
                    if attempt == 2:
                        raise
            await self.load(redis)
        raise AssertionError("unreachable")
