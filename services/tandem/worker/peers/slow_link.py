"""A link that is slower than the one that is there, for tests and measurements."""

import asyncio


class SlowLink:
    """A simulated link that all pulls of a worker share: their bytes come one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        """The bandwidth 0 is no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # by the event loop's clock

    async def carry(self, num_bytes: int, began_at: float) -> None:
        """Returns when the link would have brought the bytes of a pull that began then."""
        if not self._bytes_per_s:
            return
        self._free_at = max(self._free_at, began_at) + num_bytes / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at - asyncio.get_running_loop().time()))

    def seconds(self, num_bytes: int, seconds: float) -> float:
        """Returns how long bytes that took `seconds` take over the link, if nothing else does."""
        return max(seconds, num_bytes / self._bytes_per_s) if self._bytes_per_s else seconds
