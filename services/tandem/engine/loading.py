"""The blocks of one sequence that come from a tier below the pool.

[ held | computed meanwhile, or to be loaded | the rest is computed ]
       ^ num_stored_blocks                   end
[ held, computed | a gap: it could not be loaded | loaded | the rest ]     a load that failed
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Loading:
    end: int = 0  # LOADING: its first blocks that will be there
    computes: bool = False  # LOADING: it computes the first of them meanwhile
    num_spared: int = 0  # of those to be loaded: so many are expected to be computed instead
    awaits: bool = True  # LOADING: what comes after it may come from a peer
    loaded: range = range(0)  # in place, and not reached by computing yet

    def take(self, first: int, end: int) -> None:
        """The load ended: blocks first..end - 1 are in place."""
        self.end, self.computes, self.loaded = 0, False, range(first, end)

    def skip(self, num_blocks: int) -> int:
        """Returns how many first blocks are in place once so many are."""
        if self.loaded and num_blocks >= self.loaded.start:
            num_blocks, self.loaded = max(num_blocks, self.loaded.stop), range(0)
        return num_blocks
