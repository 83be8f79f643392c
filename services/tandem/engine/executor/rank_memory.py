"""The memory that the ranks of an engine share, and the messages that rank 0 posts there.

The memory is a memfd of many gigabytes, of which the system allocates only the pages that are
written:

    | header | buffers of a step | logits | message |

The C++ kernels compute a step in the buffers. With other kernels, the ranks exchange tensors there
instead (ranks/shared_memory.py):

    | header | a header for each rank | first places of all ranks | second places of all ranks |
"""

from __future__ import annotations

import mmap
import os
import pickle
from array import array
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.errors import ConfigError
from tandem_kernels.native.library import SharedMemory, load

# Room for one buffer: larger than any step needs. A step of 2,048 tokens needs 0.5 GB for the
# widest buffer of a model with 70 billion parameters.
_BUFFER_BYTES = 4 << 30
_MAP_NORESERVE = 0x4000  # the mmap module of Python 3.11 and 3.12 has no constant for it
_ALIGNMENT = 64
_HEADER_BYTES = 4096  # room for one header (kSharedHeader of team.h)


class Message(NamedTuple):
    """A message of rank 0 with an array of numbers, such as the inputs of a step."""

    content: Any
    numbers_address: int


class RankMemory:
    """One rank's mapping of the shared memory. `fd` is the memfd's descriptor."""

    def __init__(self, fd: int, *, rank: int, num_ranks: int) -> None:
        """Maps the memory. Raises ConfigError if the system refuses the address space."""
        library = load()
        assert library is not None
        self._library = library
        self.fd = fd
        self.rank = rank
        self.num_ranks = num_ranks
        self._logits_at = library.shared_bytes(_BUFFER_BYTES)
        self._message_at = self._logits_at + _BUFFER_BYTES
        self._places_at = (1 + num_ranks) * _HEADER_BYTES
        self._place_bytes = _BUFFER_BYTES // num_ranks // _HEADER_BYTES * _HEADER_BYTES
        size = self._message_at + _BUFFER_BYTES
        flags = mmap.MAP_SHARED | _MAP_NORESERVE
        try:
            if rank == 0:
                os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size, flags=flags)
        except OSError as error:
            raise ConfigError(
                f"tensor-parallel={num_ranks}: {size >> 30} GiB of address space cannot be mapped: "
                f"{error}. Check the limit that `ulimit -v` shows; unused address space takes no "
                "memory"
            ) from error
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._address = self._bytes.ctypes.data
        # Headers that count the exchanges of each rank.
        self._headers = [self._address + (1 + at) * _HEADER_BYTES for at in range(num_ranks)]
        if rank == 0:
            for header in (self._address, *self._headers):
                library.share(header)

    @classmethod
    def create(cls, num_ranks: int) -> RankMemory:
        """Creates the memory as rank 0. Raises ConfigError."""
        fd = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        return cls(fd, rank=0, num_ranks=num_ranks)

    @property
    def share(self) -> SharedMemory:
        return SharedMemory(self.rank, self.num_ranks, self._address, _BUFFER_BYTES)

    def logits(self) -> torch.Tensor:
        """Returns the room for the logits of a step, fp32."""
        count = _BUFFER_BYTES // 4
        return torch.frombuffer(
            self._memory, dtype=torch.float32, count=count, offset=self._logits_at
        )

    def place(self, rank: int, turn: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a rank's place for one exchanged tensor of the given shape. `turn` is 0 or 1."""
        count = prod(shape)
        if count * dtype.itemsize > self._place_bytes:
            raise MemoryError(
                f"a tensor for the exchange between ranks has {count * dtype.itemsize} bytes, but "
                f"at most {self._place_bytes} bytes are allowed; lower max-tokens-per-step"
            )
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        at = self._places_at + (turn * self.num_ranks + rank) * self._place_bytes
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(*shape)

    def meet(self, num_before: int) -> None:
        """Waits until all ranks have called this function `num_before` + 1 times, as this rank has
        now. What they wrote before can be read then. Raises RankEnded."""
        self._library.post(self._headers[self.rank])
        for header in self._headers:
            self._library.wait_for_message(header, num_before & 0xFFFFFFFF)

    def post(self, content: object, numbers: array[int] | memoryview | None = None) -> None:
        """Sends a message to all other ranks, when they have taken the one before. Rank 0 calls
        this. Raises RankEnded."""
        self._library.wait_until_taken(self._address, self.num_ranks - 1)
        pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        first = self._message_at + 8
        self._memory[first - 8 : first] = len(pickled).to_bytes(8, "little")
        self._memory[first : first + len(pickled)] = pickled
        if numbers:
            data = np.frombuffer(memoryview(numbers).cast("B"), np.uint8)
            at = self._numbers_at(len(pickled))
            self._bytes[at : at + len(data)] = data
        self._library.post(self._address)

    def messages(self) -> Iterator[Message]:
        """Yields the messages of rank 0, forever. Rank 0 may overwrite a message as soon as the
        caller asks for the next one. Raises RankEnded."""
        for number in range(1 << 62):
            self._library.wait_for_message(self._address, number & 0xFFFFFFFF)
            first = self._message_at + 8
            size = int.from_bytes(self._memory[first - 8 : first], "little")
            content = pickle.loads(self._memory[first : first + size])
            yield Message(content, self._address + self._numbers_at(size))
            self._library.take(self._address)

    def _numbers_at(self, pickled_bytes: int) -> int:
        end = self._message_at + 8 + pickled_bytes
        return -(-end // _ALIGNMENT) * _ALIGNMENT

    def break_up(self) -> None:
        """Ends all waiting in all ranks, because one of them has ended."""
        for header in (self._address, *self._headers):
            self._library.break_up(header)
