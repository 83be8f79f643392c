import json

import numpy as np
import pytest
import torch
import transformers

from tandem.errors import UnsupportedModel
from tandem.models.gguf import weights as gguf_weights
from tandem.models.gguf.convert import converted_folder
from tandem.models.gguf.weights import hf_name, unpermute


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
        architecture, keys = "llama", {"attention.sliding_window": 8}
    file = tiny_gguf.write(
        tmp_path / "tiny.gguf", tiny_gguf.tensors_of(origin), architecture=architecture, keys=keys
    )
    folder = converted_folder(file, cache_dir=tmp_path)
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
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    assert unpermute(rows, 2).tolist() == list(range(8))


def test_names():
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_shexp.weight", "token_embd_norm.weight", "attn_q.weight", "x"]
)
def test_tensors_without_a_place_are_named(name):
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} is not supported"):
        hf_name(name)


def test_large_models_are_written_in_shards(tmp_path, tiny_gguf, monkeypatch):
    monkeypatch.setattr(gguf_weights, "_SHARD_BYTES_MAX", 4 * 100)
    names = ["token_embd.weight", "blk.0.attn_norm.weight", "output_norm.weight"]
    tensors = {name: np.full((2, 32), i, np.float32) for i, name in enumerate(names)}
    folder = converted_folder(tiny_gguf.write(tmp_path / "a.gguf", tensors), cache_dir=tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        "model.embed_tokens.weight": "model-00001-of-00003.safetensors",
        "model.layers.0.input_layernorm.weight": "model-00002-of-00003.safetensors",
        "model.norm.weight": "model-00003-of-00003.safetensors",
    }
    assert sorted(file.name for file in folder.glob("*.safetensors")) == sorted(index.values())
