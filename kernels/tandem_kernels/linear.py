"""Linear layers: y = x W^T + b, with x [T, in] and W [out, in].

If `out` is given, the result is written to this tensor, which may be some columns of a wider
tensor.

The functions `*_of_heads` multiply each head by its own matrix: y[:, h] = x[:, h] W[h]^T, with
x [T, heads, in] and W [heads, out, in].
"""

import torch

TILE_ROWS = 16


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x W^T + b, [T, out]. The last bits of a row may depend on T."""
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear_invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x W^T + b, [T, out]. The bits of a row do not depend on the other rows. T must be a
    multiple of TILE_ROWS.

    A BLAS library chooses the order of additions by the shape of a product. Therefore x is always
    multiplied in tiles of TILE_ROWS rows, so that all products with W have the same shape.
    """
    assert x.shape[0] % TILE_ROWS == 0
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    transposed = weight.t()
    for first in range(0, x.shape[0], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        torch.mm(x[rows], transposed, out=out[rows])
    return out if bias is None else out.add_(bias)


def linear_of_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x[:, h] W[h]^T for all heads h, [T, heads, out]. The last bits of a row may depend on
    T."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def linear_of_heads_invariant(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x[:, h] W[h]^T for all heads h, [T, heads, out]. As in linear_invariant, the bits of
    a row do not depend on the other rows."""
    assert x.shape[0] % TILE_ROWS == 0
    tiles = x.reshape(-1, TILE_ROWS, *x.shape[1:])
    return torch.cat([linear_of_heads(tile, weight) for tile in tiles])
