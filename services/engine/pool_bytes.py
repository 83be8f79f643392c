"""Blocks of a KV pool as bytes, for the transport that carries them through gRPC."""

from __future__ import annotations

import numpy as np
import torch

from services.engine.layout import BlockLayout
from services.errors import InternalError


class PoolBytes:
    """A view of the pool `kv` (any dtype, any device) as [num_blocks, block_bytes] uint8."""

    def __init__(self, kv: torch.Tensor, layout: BlockLayout) -> None:
        self._blocks = kv.view(layout.num_blocks, -1).view(torch.uint8)
        assert self._blocks.shape[1] == layout.block_bytes

    def read(self, block_ids: list[int]) -> bytes:
        """The blocks' bytes, one after another."""
        chosen = self._blocks[torch.tensor(block_ids, device=self._blocks.device)]
        return chosen.cpu().numpy().tobytes()

    def write(self, block_ids: list[int], data: bytes) -> None:
        """Fills the blocks. Raises InternalError when the size does not fit them."""
        if len(data) != len(block_ids) * self._blocks.shape[1]:
            raise InternalError(f"{len(data)} bytes are not {len(block_ids)} blocks")
        source = np.frombuffer(data, np.uint8).copy().reshape(len(block_ids), -1)
        index = torch.tensor(block_ids, device=self._blocks.device)
        self._blocks[index] = torch.from_numpy(source).to(self._blocks.device)
