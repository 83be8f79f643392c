"""The copies of the residual stream of Gemma 3n (models/config/gemma3n.py), and its sparse gates.

All sums over the copies are computed one after the other, so that the bits of a row do not depend
on the other rows of a step.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import pad, relu

from tandem.engine.executor.weights.decoder_weights import AltUpWeights, LaurelWeights, Linear
from tandem.models.config.gemma3n import AltUp

_VECTOR = 32  # largest number of elements that torch computes at once, or a multiple of it
_MAGNITUDE_MIN = 1e-5

Project = Callable[[torch.Tensor, tuple[Linear, ...]], torch.Tensor]
Norm = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class AltUpStreams:
    """Computes the copies of the residual stream, a list of tensors [T, hidden]."""

    def __init__(self, sizes: AltUp, project: Project, norm: Norm) -> None:
        self._sizes = sizes
        self._project = project
        self._norm = norm

    def start(self, x: torch.Tensor, projections: tuple[Linear, ...]) -> list[torch.Tensor]:
        """Returns the copies from the embeddings `x`. Each copy has their magnitude."""
        return [x, *(_as_large(self._project(x, (each,)), x) for each in projections)]

    def merge(self, streams: list[torch.Tensor], projections: tuple[Linear, ...]) -> torch.Tensor:
        """Returns the mean of all copies after the last layer."""
        first, *others = streams
        total = first
        for other, each in zip(others, projections, strict=True):
            total = total + _as_large(self._project(other, (each,)), first)
        return total / len(streams)

    def predict(self, weights: AltUpWeights, streams: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the prediction of each copy: the copy plus a sum of all copies, whose factors
        follow from the active one."""
        num = self._sizes.num
        modes = self._modes(weights, self.active(streams))
        factors = self._project(modes, (weights.prediction,)).view(-1, num, num, 1)
        predicted = []
        for at, stream in enumerate(streams):
            total = streams[0] * factors[:, at, 0]
            for other in range(1, num):
                total = total + streams[other] * factors[:, at, other]
            predicted.append(total + stream)
        return predicted

    def active(self, streams: list[torch.Tensor]) -> torch.Tensor:
        """Returns the copy that a layer computes."""
        return streams[self._sizes.active]

    def correct(
        self, weights: AltUpWeights, predicted: list[torch.Tensor], computed: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns the copies after a layer, which has computed the active one."""
        modes = self._modes(weights, computed)
        factors = self._project(modes, (weights.correction,)) + 1.0
        difference = computed - self.active(predicted)
        return [each + difference * factors[:, at, None] for at, each in enumerate(predicted)]

    def selecting(self, weights: AltUpWeights, streams: list[torch.Tensor]) -> torch.Tensor:
        """Returns the tensor [T, hidden] that selects the tokens' embeddings for a layer."""
        active = self.active(streams)
        return active * weights.output_scale if self._sizes.scales_output else active

    def laurel(self, weights: LaurelWeights, normed: torch.Tensor) -> torch.Tensor:
        """Returns the output of LAuReL for the input of attention, [T, hidden]."""
        narrow = self._project(normed, (weights.left,))
        return normed + self._norm(self._project(narrow, (weights.right,)), weights.norm)

    def _modes(self, weights: AltUpWeights, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, copies], from which the factors of copies are computed."""
        normed = self._norm(x, weights.router_norm) * x.shape[-1] ** -1.0
        modes = self._project(normed, (weights.router,))
        # The bits of tanh depend on the place in a vector, so a row takes whole ones.
        padded = pad(modes.float(), (0, -modes.shape[1] % _VECTOR))
        return torch.tanh(padded)[:, : modes.shape[1]].to(x.dtype).contiguous()


def gate_deviations(sparsity: float, dtype: torch.dtype = torch.float32) -> float:
    """Returns how many standard deviations the quantile `sparsity` of a normal distribution is
    above the mean, rounded to `dtype`."""
    return (torch.erfinv(2 * torch.tensor(sparsity) - 1) * 2**0.5).to(dtype).item()


def sparse_gates(gate: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Returns relu(gate - cutoff). The cutoff of a row is its quantile `sparsity`, if the row is
    normally distributed."""
    deviations = gate_deviations(sparsity, gate.dtype)
    mean = gate.mean(-1, keepdim=True)
    deviation = gate.std(-1, keepdim=True, unbiased=False)
    return relu(gate - (mean + deviation * deviations))


def _as_large(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns x with the root mean square of `other` in each row."""
    own = (x**2).mean(-1, keepdim=True).clamp(min=_MAGNITUDE_MIN).sqrt()
    return x * (other**2).mean(-1, keepdim=True) ** 0.5 / own
