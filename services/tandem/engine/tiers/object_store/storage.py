"""Keeps the blocks of a tier in an object store, which the workers of all machines share.

    PREFIX/1-MODEL/HASH     a block: checksum, 8 bytes | the block's bytes, sealed (seal.py)
    PREFIX/1-MODEL/HASH-1   the same for the model's second KV group
    PREFIX/1-MODEL/about    a description of everything on which the KV depends

MODEL is a digest of this description, and HASH is the block's hash. So a worker finds the blocks
that any other worker wrote. A slot has no memory in this storage: the number of slots only limits
how many blocks a worker remembers.

Each object has one block. Objects of several blocks would save requests, but requests run in
parallel anyway. And prompts that diverge within such an object would each write the object's first
blocks again.

Every failure is an OSError or a BadBlock. After an error of the store, the storage makes no
requests for a while. Then a single request tests whether the store works again.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import xxhash

from tandem.common.backoff import Backoff, doubling
from tandem.common.kv_tiers import STORE
from tandem.engine.tiers.seal import Seal
from tandem.engine.tiers.storage import BadBlock, Bytes, Entry, SharedStorage
from tandem.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

# Time limit for a request, in seconds. A load that gets no block in this time is cancelled anyway.
REQUEST_S = 2.0
REMEMBERED = 65_536  # number of blocks in the store that a worker remembers
_AT_ONCE = 8  # maximum number of writes in flight, and maximum number of reads in flight
_START_S = 60.0  # time limit for the start of the threads; long, because the machine may be busy
_PAUSE_S = 1.0
_PAUSE_S_MAX = 30.0
_CHECKSUM_BYTES = 8


class ObjectStorage(SharedStorage):
    name = STORE
    num_slots = REMEMBERED

    def __init__(self, client: Any, *, place: str, identity: str, seal: Seal) -> None:
        """`client` is a store of obstore. `place` is the store's name in error messages. `identity`
        names everything on which the KV depends. Raises ConfigError if the store refuses writes."""
        import obstore

        self._obstore = obstore
        self._client = client
        self._seal = seal
        about = f"{identity} {seal.name}".encode()
        self._folder = f"1-{blake2b(about, digest_size=16).hexdigest()}"
        self._writers = _start_threads("store-put")
        self._readers = _start_threads("store-get")
        self._health = _Health()
        self._suffix = ""
        try:
            self._request(obstore.put, f"{self._folder}/about", about)
            # Checks that the client may list the bucket. If it may not, AWS answers with 403
            # instead of 404, and `_has` raises PermissionError.
            self._has(bytes(16))
        except PermissionError as error:
            raise ConfigError(
                f"kv-store-url {place}: the store refuses the credentials ({error}). They come "
                "from kv-store-credentials or, if this option is not set, from the environment "
                "(AWS_ACCESS_KEY_ID)"
            ) from error
        except FileNotFoundError as error:
            raise ConfigError(
                f"kv-store-url {place}: the bucket does not exist ({error})"
            ) from error
        except OSError as error:
            log.warning(
                "the object store at kv-store-url %s does not answer (%s); the worker starts "
                "without the object store and tries again later",
                place,
                error,
            )

    def of_group(self, group: int, seal: Seal) -> ObjectStorage:
        """Returns the storage of another KV group of the model in the same store."""
        other = copy.copy(self)
        other._suffix = f"-{group}"
        other._seal = seal
        return other

    @property
    def is_ready(self) -> bool:
        return self._health.is_ready

    def begin_write(self, slot: int, entry: Entry, data: Bytes) -> Callable[[], None]:
        return self._writers.submit(self.write, slot, entry, data).result

    def begin_read(self, slot: int, block_hash: bytes) -> Callable[[Bytes], None]:
        return partial(self._take, self._readers.submit(self._get, block_hash), block_hash)

    def write(self, slot: int, entry: Entry, data: Bytes) -> None:
        sealed = self._seal.seal(entry.block_hash, data)
        checksum = _checksum(entry.block_hash, sealed)
        self._request(self._obstore.put, self._name(entry.block_hash), checksum + sealed.tobytes())

    def read(self, slot: int, block_hash: bytes, target: Bytes) -> None:
        self.begin_read(slot, block_hash)(target)

    def look_up(self, block_hashes: Sequence[bytes], first: int) -> int:
        """Returns how many leading blocks of a chain are in the store. The first `first` blocks are
        known to be there.

        Assumes that the store has complete prefixes; a load detects a gap. This costs one request
        if the next block is not in the store. Otherwise it costs log(length) / log(9) rounds of 8
        parallel requests.
        """
        if not self._has(block_hashes[first]):
            return first
        low = first + 1  # lower bound of the result
        high = len(block_hashes)  # upper bound of the result
        while low < high:
            step = -(-(high - low) // (_AT_ONCE + 1))
            probes = [*range(low + step, high, step), high][:_AT_ONCE]
            found = list(self._readers.map(self._has, [block_hashes[at - 1] for at in probes]))
            num_there = found.index(False) if False in found else len(found)
            if num_there < len(probes):
                high = probes[num_there] - 1
            if num_there:
                low = probes[num_there - 1]
        return low

    def look_up_each(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Returns, for each of these blocks, whether it is in the store."""
        return list(self._readers.map(self._has, block_hashes))

    def forget(self) -> None:
        """Does nothing, because other workers share these blocks."""

    def entries(self) -> list[tuple[int, Entry]]:
        """Returns an empty list. The blocks in the store are looked up for each prompt instead."""
        return []

    def close(self) -> None:
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _get(self, block_hash: bytes) -> bytes:
        data: bytes = self._request(
            lambda *about: self._obstore.get(*about).bytes(), self._name(block_hash)
        )
        return data

    def _take(self, got: Future[bytes], block_hash: bytes, target: Bytes) -> None:
        try:
            data = np.frombuffer(got.result(), np.uint8)
        except FileNotFoundError as error:
            raise BadBlock("the block is no longer in the object store") from error
        checksum = data[:_CHECKSUM_BYTES].tobytes()
        body = data[_CHECKSUM_BYTES:]
        sealed = self._seal.buffer(target)
        if body.nbytes != sealed.nbytes:
            raise BadBlock(f"the block has {body.nbytes} bytes instead of {sealed.nbytes}")
        if _checksum(block_hash, body) != checksum:
            raise BadBlock("the checksum of the block does not match")
        sealed[:] = body
        self._seal.open(block_hash, sealed, target)

    def _has(self, block_hash: bytes) -> bool:
        try:
            self._request(self._obstore.head, self._name(block_hash))
        except FileNotFoundError:
            return False
        return True

    def _name(self, block_hash: bytes) -> str:
        return f"{self._folder}/{block_hash.hex()}{self._suffix}"

    def _request(self, call: Callable[..., T], name: str, *data: bytes) -> T:
        """Makes a request to the store. Raises OSError if the request fails. If the store is not
        ready, raises OSError without a request."""
        self._health.enter()
        errors = self._obstore.exceptions
        try:
            answer = call(self._client, name, *data)
        except FileNotFoundError:
            self._health.succeed()
            raise
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            self._health.fail(error)
            raise PermissionError(_first_line(error)) from error
        except (errors.BaseError, OSError) as error:
            self._health.fail(error)
            raise OSError(_first_line(error)) from error
        # For example a panic in obstore, which is not an obstore.BaseError.
        except BaseException as error:
            self._health.fail(error)
            raise
        self._health.succeed()
        return answer


class _Health:
    """Decides whether a request to the store may be made: after a failure, none is made for a
    while. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._backoff = Backoff(doubling(_PAUSE_S, _PAUSE_S_MAX))
        self._has_failed = self._is_probed = False
        self._ready_at = 0.0

    @property
    def is_ready(self) -> bool:
        with self._lock:
            return self._may_request()

    def enter(self) -> None:
        """Must be called before a request. Raises OSError if no request may be made now. If a
        single request is testing the store after a failure, other requests wait here for the
        result."""
        with self._lock:
            self._lock.wait_for(lambda: not self._is_probed, 2 * REQUEST_S)
            if not self._may_request():
                raise OSError("the object store failed recently; requests to it are paused")
            self._is_probed = self._has_failed

    def succeed(self) -> None:
        with self._lock:
            if self._has_failed:
                log.info("the object store answers again")
                self._backoff.reset()
            self._has_failed = self._is_probed = False
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            # Requests that were already in flight at the first failure do not extend the pause.
            if not self._has_failed or self._is_probed:
                pause_s = self._backoff.next_s()
                log.warning(
                    "the object store failed (%s) and is not used for the next %.0f s",
                    _first_line(error),
                    pause_s,
                )
                self._ready_at = time.monotonic() + pause_s
            self._has_failed = True
            self._is_probed = False
            self._lock.notify_all()

    def _may_request(self) -> bool:
        if not self._has_failed:
            return True
        return not self._is_probed and time.monotonic() >= self._ready_at


def _start_threads(name: str) -> ThreadPoolExecutor:
    """Returns a thread pool whose threads are all running. Raises ConfigError if they do not start.

    By default a pool starts a thread only when a call is submitted. If this start failed, `submit`
    would raise an error but leave the call in the queue. It would then be unknown whether the call,
    such as a write, takes place.
    """
    threads = ThreadPoolExecutor(_AT_ONCE, name)
    all_run = threading.Barrier(_AT_ONCE, timeout=_START_S)
    try:
        list(threads.map(lambda _: all_run.wait(), range(_AT_ONCE)))
    except RuntimeError as error:  # a thread could not be started, or the barrier timed out
        all_run.abort()
        raise ConfigError(
            f"the {_AT_ONCE} threads that send requests to the object store could not be started "
            f"({error!r}); check the limit on threads (ulimit -u, or the container's pids limit)"
        ) from error
    return threads


def _checksum(block_hash: bytes, sealed: Bytes) -> bytes:
    seed = int.from_bytes(block_hash[:8], "little")
    return xxhash.xxh3_64_digest(np.ascontiguousarray(sealed).data, seed)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
