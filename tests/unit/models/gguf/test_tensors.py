import gguf
import numpy as np
import pytest
import torch
import transformers

from tandem.errors import UnsupportedModel
from tandem.models.gguf.export import export
from tandem.models.gguf.names import hf_name
from tandem.models.gguf.tensors import GgufBlocks, is_packed, read_tensors, unpermute
from tandem.models.source import resolve
from tests.random_blocks import NATIVE_TYPES, TYPES, random_blocks


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 32}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_the_converted_model_computes_what_its_origin_did(
    tmp_path, tiny_gguf, architecture, options
):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=tiny_gguf.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        **options,
    )
    origin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in origin.parameters():  # norms and biases too, which start at 1 and 0
        torch.nn.init.normal_(parameter, std=0.3)
    keys = {"attention.key_length": options["head_dim"]} if "head_dim" in options else {}
    if "head_dim" in options:
        keys["attention.value_length"] = options["head_dim"]
    if architecture == "mistral":  # whose GGUF files say llama
        architecture = "llama"
        keys = {"attention.sliding_window": 8}
    file = tiny_gguf.write(
        tmp_path / "tiny.gguf", tiny_gguf.tensors_of(origin), architecture=architecture, keys=keys
    )
    folder = export(resolve(str(file), cache_dir=tmp_path), tmp_path / "exported")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, origin(ids).logits, rtol=0, atol=0)


def test_rows_go_back_to_halves():
    # Two heads of size 4; GGUF's order within a head is 0 2 1 3 of ours.
    rows = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
    assert unpermute(rows, 2).tolist() == list(range(8))


def test_names():
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    correction = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert hf_name("blk.3.exp_probs_b.bias", "DeepseekV3ForCausalLM") == correction


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_shexp.weight", "token_embd_norm.weight", "attn_q.weight", "x"]
)
def test_tensors_without_a_place_are_named(name):
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} does not belong to Llama"):
        hf_name(name)


@pytest.mark.parametrize("name", [*TYPES, *NATIVE_TYPES])
def test_blocks_are_widened_as_the_gguf_package_does(name):
    blocks = random_blocks(name, 5, 512)
    expected = gguf.dequantize(blocks.data.numpy(), blocks.type)
    assert np.array_equal(blocks.numbers().numpy(), expected)
    assert 0.3 < expected.std() * 512**0.5 < 3


def test_types_that_the_kernels_do_not_know_are_widened_by_the_gguf_package():
    kind = gguf.GGMLQuantizationType.IQ2_S
    data = np.random.default_rng(0).integers(0, 60, (2, 82), np.uint8)
    blocks = GgufBlocks(torch.from_numpy(data), kind, (2, 256))
    assert not is_packed(blocks.type)
    assert np.array_equal(blocks.numbers().numpy(), gguf.dequantize(data, kind), equal_nan=True)


def test_tensors_are_read_as_they_are_stored(tmp_path, tiny_gguf):
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (rows, None),
        "blk.0.attn_v.weight": (rows, gguf.GGMLQuantizationType.Q4_0),
        "blk.0.ffn_up.weight": (rows, gguf.GGMLQuantizationType.BF16),
        "blk.0.ffn_norm.weight": (rows[0].astype(np.float16), None),
    }
    stored = {
        name: array if kind is None else gguf.quantize(array, kind)
        for name, (array, kind) in tensors.items()
    }
    file = tiny_gguf.write(
        tmp_path / "tiny.gguf", stored, types={name: kind for name, (_, kind) in tensors.items()}
    )
    found = read_tensors([file], resolve(str(file), cache_dir=tmp_path).config)
    layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in found.items()}
    numbers = {name: blocks.numbers() for name, blocks in layer.items()}
    wanted = torch.from_numpy(rows)
    assert torch.equal(numbers["self_attn.q_proj.weight"], unpermute(wanted, num_heads=4))
    assert layer["self_attn.v_proj.weight"].data.shape == (64, 36)
    assert layer["self_attn.v_proj.weight"].dtype is None
    assert torch.allclose(numbers["self_attn.v_proj.weight"], wanted, atol=0.3)
    assert torch.equal(numbers["mlp.up_proj.weight"], wanted.bfloat16())
    assert torch.equal(numbers["post_attention_layernorm.weight"], wanted[0].half())
