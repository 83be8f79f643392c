"""The notice in Redis by which operators see that a worker is loading.

A worker has no record before its model is known, so the notice takes the record's place.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from redis.exceptions import RedisError

from tandem.common.config.cluster import pool_name
from tandem.common.config.worker import WorkerConfig
from tandem.common.process.cancellation import cancel
from tandem.net.store.client import UNREACHABLE, connect
from tandem.net.store.registry import LoadingNotice, Registry
from tandem.worker.engine_process.link import EngineLink
from tandem.worker.engine_process.messages import Ready

log = logging.getLogger(__name__)

_END_DEADLINE_S = 1.0
_FAILED_MAX = 500  # a reason is cut to this many characters


async def start_and_tell(config: WorkerConfig, link: EngineLink) -> Ready:
    """Starts the engine and publishes its progress. Raises the errors of `EngineLink.start`."""
    telling = asyncio.create_task(tell_loading(config, lambda: link.loading))
    try:
        return await link.start()
    finally:
        await cancel(telling)


async def tell_failed(config: WorkerConfig, why: str) -> None:
    """Writes a notice that says why this worker ends before it serves. Redis may be unavailable."""
    redis = connect(config.cluster.redis_url)
    told = LoadingNotice(pool_name(config.group, config.role), failed=why[:_FAILED_MAX])
    try:
        async with asyncio.timeout(_END_DEADLINE_S):
            await Registry(redis, config.cluster).tell_loading(config.worker_id, told)
    except (*UNREACHABLE, RedisError, TimeoutError) as error:
        log.debug("the failure of this worker could not be written to Redis: %r", error)
    await redis.aclose()


async def tell_loading(config: WorkerConfig, progress: Callable[[], tuple[int, int]]) -> None:
    """Writes the notice every `record_interval_s` until the task is cancelled; then deletes it.

    `progress` returns (bytes of weights loaded, bytes of all weights). A Redis error does not stop
    the start.
    """
    redis = connect(config.cluster.redis_url)
    registry = Registry(redis, config.cluster)
    told = LoadingNotice(pool_name(config.group, config.role))
    try:
        while True:
            num_bytes, num_bytes_all = progress()
            told = msgspec.structs.replace(
                told,
                num_bytes=num_bytes,
                num_bytes_all=num_bytes_all,
                num_writes=told.num_writes + 1,
            )
            try:
                await registry.tell_loading(config.worker_id, told)
            except (*UNREACHABLE, RedisError) as error:
                log.debug("the progress of loading could not be written to Redis: %r", error)
            await asyncio.sleep(config.cluster.record_interval_s)
    finally:
        try:
            async with asyncio.timeout(_END_DEADLINE_S):
                await registry.end_loading(config.worker_id)
        except (*UNREACHABLE, RedisError, TimeoutError) as error:
            log.debug(
                "the loading progress of the model could not be removed from Redis: %r", error
            )
        await redis.aclose()
