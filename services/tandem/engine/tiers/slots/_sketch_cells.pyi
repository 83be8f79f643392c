from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def add(cells: npt.NDArray[np.float64], block_hashes: Sequence[bytes], weight: float) -> None: ...
def smallest(cells: npt.NDArray[np.float64], block_hash: bytes) -> float: ...
