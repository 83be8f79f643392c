"""A simulated slow link, for tests and measurements."""

import asyncio


class SlowLink:
    """A simulated link that all pulls of a worker share. It transfers one pull after another."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` is the bandwidth; 0 means no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # time at which the link is free again, on the event loop's clock

    async def carry(self, num_bytes: int, began_at: float) -> None:
        """Waits until the link would have transferred the bytes of a pull that began at
        `began_at`.
        """
        if not self._bytes_per_s:
            return
        self._free_at = max(self._free_at, began_at) + num_bytes / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at - asyncio.get_running_loop().time()))

    def seconds(self, num_bytes: int, seconds: float) -> float:
        """Returns the seconds that a pull takes over this link if no other pull uses the link.

        `seconds` is the time that the pull took without the simulated link.
        """
        return max(seconds, num_bytes / self._bytes_per_s) if self._bytes_per_s else seconds
