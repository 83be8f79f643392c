"""Reads and writes of KV blocks in a pool [num_blocks, num_kv_heads, num_layers, 2, block_size, D].

A block holds all layers, so one layer's K or V of one head in one block is a contiguous run of
`block_size` rows of D elements. Index tensors are made once a step for layer 0; other layers add
a constant. Knows no sequences: block ids and offsets in, rows out.
"""

import torch


class KvPool:
    """Views of one pool tensor, with the strides that indexing needs."""

    def __init__(self, kv: torch.Tensor) -> None:
        _, self.num_kv_heads, self.num_layers, _, self.block_size, self.head_dim = kv.shape
        self.device = kv.device
        self.dtype = kv.dtype
        self._tokens = kv.view(-1, self.head_dim)
        self._runs = kv.view(-1, self.block_size * self.head_dim)
        self._heads = torch.arange(self.num_kv_heads, device=kv.device)

    def token_rows(self, block_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the rows [T, heads] of layer 0's K, for slots (block id, offset), each [T]."""
        return self._first_runs(block_ids) * self.block_size + offsets.unsqueeze(-1)

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores K and V, each [T, heads, D] in any dtype, in the slots of `token_rows`."""
        rows = token_rows + 2 * layer * self.block_size
        self._tokens.index_put_((rows,), keys.to(self.dtype))
        self._tokens.index_put_((rows + self.block_size,), values.to(self.dtype))

    def block_rows(self, block_tables: torch.Tensor) -> torch.Tensor:
        """Returns the runs of layer 0's K and V in blocks [B, M]: [2 * B * heads * M]."""
        runs = self._first_runs(block_tables).transpose(1, 2)
        return torch.stack((runs, runs + 1)).flatten()

    def gather(self, layer: int, block_rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """K and V of whole blocks, copied together: [2, B, heads, M * block_size, D]."""
        runs = torch.index_select(self._runs, 0, block_rows + 2 * layer)
        return runs.view(2, num_seqs, self.num_kv_heads, -1, self.head_dim)

    def _first_runs(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns the run of layer 0's K in each block, for each head: [..., heads]."""
        heads = block_ids.unsqueeze(-1) * self.num_kv_heads + self._heads
        return heads * (2 * self.num_layers)


def layer_of(kv: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer of a pool, a strided view [num_blocks, heads, 2, block_size, D], for kernels that
    take strides."""
    return kv.select(2, layer)
