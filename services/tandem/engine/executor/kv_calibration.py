"""Computes the order and the scales of the key channels for an int4 KV pool, once for each model.
A channel is one element of a head. tandem_kernels/kv_int4_keys.py quantizes keys with this order
and these scales.

The model runs on a sample text in fp32. For each layer, KV head and channel, this gives two
numbers: k is the root mean square of the rotated keys, and q is the root mean square of the rotated
queries that attend to these keys.

    result of a channel   formula
    importance            k * q. The most important quarter of a head's channels comes first in the
                          order.
    scale                 k^0.75 * q^-0.25, rounded to a power of 2^(1/4). The scales of the first
                          quarter of the channels are then multiplied by 1.5.

The order and the scales are read from `FILE` in the model's folder, or else from a cache on this
machine. If neither place has a file, both are computed and written to the cache.

All workers of a model must use the same order and scales. The name of the KV data type includes a
digest of the order and the scales, so workers with different digests do not exchange blocks. Two
kinds of processors compute slightly different k and q. Rounding almost always removes the
difference. If the digests differ nevertheless, the cached file of one worker must be copied into
the model's folder on all workers.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.engine.cache.layout.kv_groups import model_layout
from tandem.engine.executor.torch.decoder import Decoder
from tandem.engine.executor.torch.inputs import make_step_inputs
from tandem.engine.executor.torch.lora import NO_LORA
from tandem.engine.executor.weights.decoder_weights import LayerWeights
from tandem.engine.executor.weights.load import load_weights
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import ConfigError
from tandem.models.config.layers import LayerSpec
from tandem.models.config.model import ModelConfig
from tandem.models.files import naming
from tandem.models.folder import ModelFolder
from tandem.models.gguf.convert import cache_root
from tandem.models.tokenizer.tokenizer import Tokenizer
from tandem_kernels.dispatch import Angles, kernels_for
from tandem_kernels.kv_cache import make_pool
from tandem_kernels.kv_int4_keys import KeyChannels

FILE = "kv_calibration.safetensors"
_VERSION = 1  # part of the cached file's name; increased when the calibration method changes
_TOKENS = 1024
_CHUNK = 256
_BLOCK_SIZE = 16
_FIRST_QUARTER = 1.5
# Lower bound of a channel's root mean square: this fraction of the largest root mean square in the
# same head. Smaller values are raised to the bound, so that a channel of zeros has a scale above 0.
_LEAST = 1e-3


def key_channels(folder: ModelFolder) -> KeyChannels:
    """Returns the channel order and the scales of a model. Reads a file that has both, or computes
    both if there is no file. Raises ConfigError if the file does not match the model."""
    config = folder.config
    if config.head_dim % 16:
        raise ConfigError(
            "kv-dtype int4 needs a head size that is a multiple of 16, but this model's head size "
            f"is {config.head_dim}; set another kv-dtype"
        )
    cached = cache_root() / "kv_calibration" / f"{folder.fingerprint}-{_VERSION}.safetensors"
    for file in (folder.path / FILE, cached):
        if file.is_file():
            return _read(file, config)
    channels = calibrate(folder)
    with suppress(OSError):  # without the cached file, the next worker calibrates again
        _write(channels, cached)
    return channels


def calibrate(folder: ModelFolder) -> KeyChannels:
    """Computes the channel order and the scales in fp32 on the CPU. Raises ConfigError if the
    tokenizer returns no tokens."""
    token_ids = [
        token
        for token in Tokenizer(folder.path).encode(_TEXT)[
            : min(_TOKENS, folder.config.max_model_len)
        ]
        if token < folder.config.vocab_size
    ]
    if not token_ids:
        raise ConfigError(
            f"{folder.path}: the tokenizer returns no tokens for the text that calibrates the KV "
            "scales"
        )
    squares = _mean_squares(folder, token_ids)
    keys, queries = (_at_least(each.sqrt()) for each in squares)
    quarter = folder.config.head_dim // 4
    first = (keys * queries).argsort(dim=-1, descending=True, stable=True)
    order = torch.cat([part.sort(-1).values for part in first.tensor_split([quarter], -1)], -1)
    exponents = (4 * (0.75 * keys.log2() - 0.25 * queries.log2())).round().long().gather(-1, order)
    roots = torch.tensor([2 ** (i / 4) for i in range(4)], dtype=torch.float64)
    scales = torch.ldexp(roots[exponents % 4], exponents.div(4, rounding_mode="floor"))
    scales[..., :quarter] *= _FIRST_QUARTER
    return KeyChannels(order.int(), scales.float())


class _ObservedDecoder(Decoder):
    """A decoder that also adds up the squares of each layer's rotated queries and keys."""

    def observe(self, num_layers: int) -> None:
        size = num_layers, self._config.num_kv_heads, self._config.head_dim
        self.squares = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
        self._numbers = {id(layer): i for i, layer in enumerate(self._weights.layers)}

    def _heads(
        self,
        layer: LayerWeights,
        spec: LayerSpec,
        projected: torch.Tensor,
        angles: Angles,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = super()._heads(layer, spec, projected, angles, num_tokens)
        queries, keys, _ = heads
        number = self._numbers[id(layer)]
        self.squares[0][number] += keys.double().square().sum(0)
        of_heads = queries[:num_tokens].double().square().sum(0)
        of_groups = of_heads.view(self._config.num_kv_heads, -1, self._config.head_dim)
        self.squares[1][number] += of_groups.mean(1)
        return heads


@torch.inference_mode()
def _mean_squares(folder: ModelFolder, token_ids: list[int]) -> list[torch.Tensor]:
    """Returns the mean squares of the keys and of the queries over the tokens, each float64
    [layers, KV heads, D]."""
    config = folder.config
    weights = load_weights(
        folder.weight_files, config, dtype=torch.float32, device=torch.device("cpu")
    )
    kernels = kernels_for("cpu", "invariant")
    decoder = _ObservedDecoder(config, weights, kernels)
    decoder.observe(config.num_layers)
    blocks = list(range(-(-len(token_ids) // _BLOCK_SIZE)))
    layout = model_layout(config, block_size=_BLOCK_SIZE, dtype="float32")
    layout = model_layout(
        config, [len(blocks)] * len(layout.groups), block_size=_BLOCK_SIZE, dtype="float32"
    )
    pools = [
        make_pool(
            torch.zeros(len(blocks), group.layout.block_bytes, dtype=torch.uint8), group.layout
        )
        for group in layout.groups
    ]
    for first in range(0, len(token_ids), _CHUNK):
        tokens = token_ids[first : first + _CHUNK]
        others = [blocks for _ in pools[1:]]
        piece = SequenceSlice(tokens, first + len(tokens), blocks, False, other_tables=others)
        inputs = make_step_inputs(StepBatch([piece]), pools, row_multiple=kernels.row_multiple)
        decoder.forward(inputs, pools, NO_LORA)
    return [total / len(token_ids) for total in decoder.squares]


def _at_least(roots: torch.Tensor) -> torch.Tensor:
    least = roots.amax(-1, keepdim=True) * _LEAST
    return torch.where(least > 0, torch.maximum(roots, least), 1.0)


def _read(file: Path, config: ModelConfig) -> KeyChannels:
    with naming(file):
        tensors = load_file(file)
        channels = KeyChannels(tensors["order"].int(), tensors["scales"].float())
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        is_order = torch.equal(
            channels.order.sort(-1).values, torch.arange(config.head_dim).int().expand(shape)
        )
        if channels.scales.shape != shape or not is_order or not (channels.scales > 0).all():
            raise ConfigError(
                f"{file} is damaged or belongs to another model: this model needs the tensors "
                f"order and scales with the shape {list(shape)} (layers, KV heads, head size). "
                "Remove the file; the worker then computes the tensors again"
            )
    return channels


def _write(channels: KeyChannels, file: Path) -> None:
    """Writes a file atomically, because several workers may write it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = Path(folder) / FILE
        save_file({"order": channels.order, "scales": channels.scales}, part)
        os.replace(part, file)


# The calibration text: prose, a chat, code, data and several languages.
_TEXT = '''The harbour lies at the mouth of a slow river. In the morning the boats come in with the
tide, and by noon the market behind the old customs house is full of people who buy fish, bread and
oranges. Most of them have known each other for years. They ask after children and parents, complain
about the price of diesel, and stay longer than they meant to. In winter, when the wind comes from
the north-east, the square is empty, and only the two cafes keep their lights on until the evening.

A lighthouse was built here in 1863, after a ship with 214 passengers had run onto the rocks. Its
lamp could be seen at a distance of 18 miles. The keeper, a man named Thomas Aldridge, wrote down the
weather four times a day for thirty-one years. His notebooks, of which all but two survive, are today
a source for historians of the climate: they show that the mean temperature of the 1870s was about
1.2 degrees lower than that of the last decade, and that storms were as frequent as they are now.

How does a computer know what time it is? A small crystal of quartz swings 32,768 times a second. A
counter divides this number by two, fifteen times in a row, and so gets one pulse a second. The
crystal is not perfect. Heat, age and the voltage of the battery change its rate by some millionths,
which is a few seconds a week. Therefore the computer asks other computers from time to time. It sends
a message, notes when the answer comes, and assumes that both ways took equally long. If that is
false, for example because the network was busy in one direction only, its clock will be wrong by
half of the difference, and nothing that it can measure will tell.

User: I have three eggs, half an onion, some rice and a tin of tomatoes. What can I cook?
Assistant: You could make a simple shakshuka. Chop the onion and fry it gently in oil for about five
minutes. Add the tomatoes, salt, pepper and, if you have it, a little cumin or paprika. Let the sauce
simmer until it is thick, make three hollows in it, and break an egg into each. Put a lid on the pan
and wait until the whites are firm. Cook the rice beside it: one cup of rice, two cups of water.
User: Can I leave out the onion?
Assistant: Yes. Use a clove of garlic instead, or nothing at all; the sauce is then a little sharper.

def median(values: list[float]) -> float:
    """Returns the middle of the sorted values, or the mean of the two in the middle."""
    if not values:
        raise ValueError("the median of no values is not defined")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

{"id": 4711, "name": "Weather station 12", "position": {"lat": 52.5163, "lon": 13.3777},
 "readings": [{"time": "2024-03-01T06:00:00Z", "celsius": 3.4, "humidity": 0.87}, {"time":
 "2024-03-01T12:00:00Z", "celsius": 9.1, "humidity": 0.61}], "active": true, "note": null}

1. Read the question twice before you answer it.
2. Say what you know, what you assume, and what you would have to look up.
3. If there are several answers, begin with the one that is most likely.

Der Zug nach Hamburg fährt heute von Gleis sieben ab. Il pleut depuis ce matin, mais le ciel
s'éclaircit. El libro que me prestaste está encima de la mesa. La biblioteca chiude alle diciotto.

Suppose that a committee of seven people votes on a proposal, and that each of them is right with a
probability of 0.7, independently of the others. The majority is then right with a probability of
about 0.87. With nineteen people it is 0.97. This argument, which the Marquis de Condorcet published
in 1785, is often quoted in favour of large juries. Its weak point is the word "independently": people
read the same newspapers, went to the same schools and listen to each other, and a committee whose
members all make the same mistake is no wiser than one of them alone.

She closed the door behind her and listened. Somewhere below, a clock was striking, and she counted
without wanting to: nine, ten, eleven. The letter was still in her pocket. "You might as well read
it," her brother had said, "it will not get any shorter." She sat down on the stairs, in the light of
the small window, and broke the seal. It was not from her father at all.
'''  # noqa: E501
