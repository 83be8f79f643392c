"""Linear layers: y = x W^T + b, with x [T, in] and W [out, in].

If `out` is given, the result is written to this tensor, which may be some columns of a wider
tensor.

The functions `*_of_heads` multiply each head by its own matrix: y[:, h] = x[:, h] W[h]^T, with
x [T, heads, in] and W [heads, out, in].
"""

import torch
from torch.nn.functional import pad

TILE_ROWS = 16
TILE_OUTPUTS = 64


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
    """Returns x W^T + b, [T, out]. T must be a multiple of TILE_ROWS. The bits of an element depend
    neither on the other rows of x nor on the other rows of W: a tensor-parallel rank that has some
    rows of W computes the same bits as a process that has all of them.

    A BLAS library chooses the order of additions by the shape of a product. Therefore x is
    multiplied in tiles of TILE_ROWS rows and W in tiles of TILE_OUTPUTS rows. A product always has
    several tiles of W, because MKL divides the sums of a single tile among threads. If the number
    of outputs is not a multiple of TILE_OUTPUTS, the last two tiles compute some outputs again.
    """
    assert x.shape[0] % TILE_ROWS == 0
    num_out = weight.shape[0]
    if out is None:
        out = x.new_empty(x.shape[0], num_out)
    num_fewest = 2 * TILE_OUTPUTS
    if num_out < num_fewest:
        out.copy_(linear_invariant(x, pad(weight, (0, 0, 0, num_fewest - num_out)))[:, :num_out])
        return out if bias is None else out.add_(bias)
    spans = [slice(0, num_out // TILE_OUTPUTS * TILE_OUTPUTS)]
    if num_out % TILE_OUTPUTS:
        spans.append(slice(num_out - num_fewest, num_out))
    for first in range(0, x.shape[0], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        for span in spans:
            tiles = weight[span].reshape(-1, TILE_OUTPUTS, weight.shape[1])
            products = torch.bmm(x[rows].expand(len(tiles), -1, -1), tiles.transpose(1, 2))
            out[rows, span] = products.transpose(0, 1).flatten(1)
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
