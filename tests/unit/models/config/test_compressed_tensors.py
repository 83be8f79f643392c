"""A module has the scheme of one of compressed-tensors' `config_groups`."""

from __future__ import annotations

from typing import Any

from tandem.models.config.quantization import read_quantization
from tandem.models.config.quantization_scheme import Quantization, Scheme

INT8 = {"type": "int", "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}
INT4 = INT8 | {"num_bits": 4, "group_size": 128}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
ATTENTION = "model.layers.1.self_attn"


def group(targets: list[str], weights: Any, **more: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": weights} | more


def read(*groups: dict[str, Any], form: str = "pack-quantized") -> Quantization | None:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": named}
    return read_quantization({"quantization_config": config})


def test_a_name_goes_before_patterns_and_these_before_all_others() -> None:
    found = read(
        group(["Linear"], INT4),
        group(["re:.*self_attn.*"], INT8),
        group([f"{ATTENTION}.k_proj"], INT4 | {"symmetric": False}),
    )
    assert found is not None
    assert found.of("model.layers.0.mlp.up_proj") == Scheme("packed", 4, group_size=128)
    assert found.of(f"{ATTENTION}.q_proj") == Scheme("packed", 8, group_size=32)
    assert found.of(f"{ATTENTION}.k_proj") == Scheme("packed", 4, group_size=128, has_zeros=True)
    assert found.growth_max == 4.5 / 4
    assert not found.is_float


def test_patterns_go_in_the_order_of_their_letters_and_need_not_match_to_the_end() -> None:
    found = read(group(["re:model.*q_proj"], INT8), group([r"re:model\.layers\.1"], INT4))
    assert found is not None
    assert found.of(f"{ATTENTION}.q_proj") == Scheme("packed", 8, group_size=32)
    assert found.of("model.layers.1.mlp.up_proj") == Scheme("packed", 4, group_size=128)
    assert found.of("model.layers.2.mlp.up_proj") is None
    assert found.of("not.model.layers.1") is None


def test_each_group_may_tell_its_format() -> None:
    found = read(
        group(["Linear"], INT4, format="pack-quantized"),
        group(["re:.*down_proj"], FP8, format="float-quantized"),
        form="mixed-precision",
    )
    assert found is not None
    assert found.of("model.layers.1.mlp.down_proj") == Scheme("scaled", 8, is_float=True)
    assert found.of("model.layers.1.mlp.up_proj") == Scheme("packed", 4, group_size=128)


def test_groups_of_activations_are_left() -> None:
    activations = group(["LlamaAttention"], None, input_activations=FP8)
    assert read(activations) is None
    found = read(activations, group(["Linear"], INT8))
    assert found == Quantization(Scheme("packed", 8, group_size=32))


def test_all_in_fp8_is_said() -> None:
    found = read(group(["Linear"], FP8), group(["x"], FP8), form="float-quantized")
    assert found is not None
    assert found.is_float
