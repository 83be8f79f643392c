"""Text parts of multimodal checkpoints, against transformers' whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.runner import ModelRunner
from tandem.errors import TandemError
from tandem.models.checkpoint.check import check_weights
from tandem.models.config.model import ModelConfig
from tandem.models.config.text_part import text_name
from tandem.models.folder import ModelFolder
from tandem.models.source import read_folder
from tests.step_batches import logits_after
from tests.tiny_models import character_tokenizer, make_tiny_model

PROMPT = torch.randint(0, 203, (90,), generator=torch.Generator().manual_seed(3)).tolist()
ENGINE = EngineConfig(model="", dtype="float32", kernels="torch", device="cpu", block_size=8)
SIZES = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
PIXTRAL = {"model_type": "pixtral", **VISION}
QWEN = {"depth": 1, "hidden_size": 16, "out_hidden_size": 96, "num_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = ROPE | {"mrope_section": [2, 3, 3]}
GLM_SECTIONS = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
GLM_VISION = QWEN | {"intermediate_size": 16, "image_size": 8, "patch_size": 4}
SCALED = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.4}
TEXT_MODELS = ("model.language_model", "model.text_model", "language_model.model")
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 40,
    "layer_types": WINDOWS,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": ROPE,
    },
}
MISTRAL = {"model_type": "mistral", "sliding_window": None, "head_dim": 32}
# name: model_type, text_config, vision_config, what the config has beside them
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", GEMMA3, SIGLIP, {"mm_tokens_per_image": 1}),
    "mistral3": ("mistral3", MISTRAL, PIXTRAL, {"tie_word_embeddings": False}),
    "mistral3-tied": ("mistral3", MISTRAL, PIXTRAL, {"tie_word_embeddings": True}),
    "llava-llama": ("llava", {"model_type": "llama"}, CLIP, {}),
    "llava-window": ("llava", MISTRAL | {"sliding_window": 40}, PIXTRAL, {}),
    "llava-onevision": ("llava_onevision", {"model_type": "qwen2"}, SIGLIP, {}),
    "qwen2-vl": (
        "qwen2_vl",
        {"model_type": "qwen2_vl_text", "rope_parameters": SECTIONS},
        {"depth": 1, "embed_dim": 16, "hidden_size": 96, "num_heads": 2},
        {},
    ),
    "qwen2.5-vl-tied": (
        "qwen2_5_vl",
        {"model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS, "tie_word_embeddings": True},
        QWEN,
        {"tie_word_embeddings": True},
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "model_type": "qwen3_vl_text",
            "rope_parameters": SECTIONS | {"mrope_interleaved": True},
        },
        QWEN | {"intermediate_size": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3.5": (
        "qwen3_5",
        {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": SECTIONS
            | {
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        QWEN,
        {},
    ),
    "minimax-m3": (
        "minimax_m3_vl",
        {
            "model_type": "minimax_m3_vl_text",
            "head_dim": 32,
            "rotary_dim": 16,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
            "intermediate_size": 44,
            "dense_intermediate_size": 76,
            "shared_intermediate_size": 52,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 20,
            "index_block_size": 8,
            "index_topk_blocks": 3,
        },
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
        {"projector_hidden_size": 16},
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            "model_type": "qwen3_vl_moe_text",
            "rope_parameters": SECTIONS | {"mrope_interleaved": True},
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 44,
        },
        QWEN | {"intermediate_size": 16, "deepstack_visual_indexes": [0]},
        {},
    ),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": SCALED},
        PIXTRAL,
        {"tie_word_embeddings": False},
    ),
    "llama4": (
        "llama4",
        {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 60,
            "num_local_experts": 4,
            "attention_chunk_size": 40,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 32,
        },
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "gemma4": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 203,
            "num_kv_shared_layers": 1,
            "use_bidirectional_attention": "vision",
        },
        {"model_type": "gemma4_vision", **VISION, "head_dim": 8, "num_key_value_heads": 2},
        {"audio_config": None},
    ),
    "glm4v": (
        "glm4v",
        {"model_type": "glm4v_text", "rope_parameters": GLM_SECTIONS},
        GLM_VISION,
        {},
    ),
    "glm4v-moe": (
        "glm4v_moe",
        {
            "model_type": "glm4v_moe_text",
            "rope_parameters": GLM_SECTIONS,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 44,
        },
        GLM_VISION,
        {},
    ),
    "idefics3": ("idefics3", {"model_type": "llama"}, VISION, {"scale_factor": 1}),
    "internvl": (
        "internvl",
        {"model_type": "qwen2"},
        VISION | {"image_size": [8, 8], "patch_size": [4, 4]},
        {},
    ),
}


def make(name: str, path: Path, **saving: Any) -> PreTrainedModel:
    """Saves a checkpoint as transformers does; returns transformers' own model of it."""
    kind, text, vision, more = PARTS[name]
    config = AutoConfig.for_model(kind, text_config=SIZES | text, vision_config=vision, **more)
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5)
    model.save_pretrained(path, **saving)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    return model


def expected(model: PreTrainedModel) -> torch.Tensor:
    if model.config.model_type == "llama4":  # transformers' whole model needs an image
        model = model.language_model
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT])).logits[0, -1]


def assert_equal(folder: ModelFolder, logits: torch.Tensor) -> None:
    """The largest logit is about 10, and the bound is of one of 19."""
    check_weights(folder.weight_files, folder.config)
    made = logits_after(ModelRunner(folder, ENGINE), PROMPT)
    torch.testing.assert_close(made, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", PARTS)
def test_logits_equal_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    folder = read_folder(tmp_path)
    assert folder.config.is_text_part
    assert folder.config.tie_word_embeddings == (
        "tied" in name or name in ("gemma3", "gemma4", "internvl")
    )
    inner = model.get_output_embeddings().weight.numel() * (not folder.config.tie_word_embeddings)
    parts = dict(model.named_modules())
    part = next(parts[n] for n in TEXT_MODELS if n in parts)
    corrections = [
        each
        for name, each in part.named_buffers()
        if name.endswith(("correction_bias", "layer_scalar"))
    ]
    stored = [*part.parameters(), *corrections]
    assert folder.num_weights == sum(each.numel() for each in stored) + inner
    assert_equal(folder, expected(model))


@pytest.mark.parametrize(
    ("inner", "output"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "lm_head."),
        ("model.language_model.model.", "model.language_model.lm_head."),
        ("model.text_model.", "lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_names_of_all_versions(inner: str, output: str, tmp_path: Path) -> None:
    model = make("mistral3", tmp_path)
    renamed = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        own = text_name(name)
        if own is not None:
            name = own.replace("lm_head.", output) if own.startswith("lm_head") else inner + own[6:]
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(read_folder(tmp_path), expected(model))


def test_gemma_3n(tmp_path: Path) -> None:
    """The whole model needs a package for its vision tower, so the reference is the text part, and
    its tensors are renamed as in the published folders."""
    model = make_tiny_model("gemma3n", tmp_path)[1]
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.language_model.{name[6:]}": each for name, each in tensors.items()}
    tower = {"model.vision_tower.stem.weight": torch.zeros(2)}
    save_file(renamed | tower, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    folder = read_folder(tmp_path)
    assert folder.config.is_text_part
    assert_equal(folder, expected(model))


def test_shards(tmp_path: Path) -> None:
    model = make("gemma3", tmp_path, max_shard_size="100KB")
    folder = read_folder(tmp_path)
    assert len(folder.weight_files) > 3
    assert_equal(folder, expected(model))


def test_kimi_k2_5_is_read_under_the_names_of_published_folders_and_of_transformers() -> None:
    text = SIZES | {"num_key_value_heads": 6, "num_experts_per_tok": 2, "model_type": "deepseek_v3"}
    config = {"architectures": ["Kimi_K25ForConditionalGeneration"], "text_config": text}
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text | {"model_type": "kimi_k2"},
    }
    found = ModelConfig.from_hf(published)
    assert found == ModelConfig.from_hf(config)
    assert (found.architecture, found.is_text_part) == ("DeepseekV3ForCausalLM", True)


def test_a_flat_config_of_qwen2_vl(tmp_path: Path) -> None:
    """The published folders have the text part's keys beside vision_config."""
    model = make("qwen2-vl", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    flat = config.pop("text_config") | config
    del flat["rope_parameters"]
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 10000.0}
    file.write_text(json.dumps(flat))
    assert_equal(read_folder(tmp_path), expected(model))


def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers() -> None:
    """Published folders of Gemma 3 4B and LLaVA 1.5 leave out most of them."""
    for kind, text, sizes in (
        (
            "Gemma3",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            (262208, 2560, 10240, 34, 8, 4, 256, 131072, True),
        ),
        (
            "Llava",
            {"architectures": ["LlamaForCausalLM"], "vocab_size": 32064, "rms_norm_eps": 1e-5},
            (32064, 4096, 11008, 32, 32, 32, 128, 2048, False),
        ),
    ):
        config = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
        made = ModelConfig.from_hf(config | {"vision_config": {}, "torch_dtype": "bfloat16"})
        found = (made.vocab_size, made.hidden_size, made.intermediate_size, made.num_layers)
        heads = (made.num_attention_heads, made.num_kv_heads, made.head_dim, made.max_model_len)
        assert (*found, *heads, made.tie_word_embeddings) == sizes
        assert made.torch_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("Mistral3", {"model_type": "cohere"}, "of the family 'cohere'"),
        ("AyaVision", {"model_type": "cohere2"}, "AyaVisionForConditionalGeneration is not"),
        (
            "Mllama",
            {"model_type": "mllama_text_model"},
            r"and neither is its text part \('mllama_text_model'\) alone",
        ),
        ("PaliGemma", {"model_type": "gemma2"}, "PaliGemmaForConditionalGeneration is not supp"),
        ("Llava", {"model_type": 5}, "of the family 5"),
        ("Llava", [], r"text_config is \[\]; it must be an object"),
        ("Llava", {"hidden_size": "x"}, "hidden_size is 'x'; it must be a positive integer"),
        ("T5", None, "architecture T5ForConditionalGeneration is not supported"),
    ],
)
def test_what_cannot_be_run_is_named(kind: str, text: Any, says: str) -> None:
    config = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": text}
    with pytest.raises(TandemError, match=says) as raised:
        ModelConfig.from_hf(config)
    assert len(raised.value.message.splitlines()) == 1


def test_tensors_of_the_text_part_are_checked(tmp_path: Path) -> None:
    make("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    for changed, says in (
        ({n: t for n, t in tensors.items() if n != name}, "lacks model.layers.1.mlp.up_proj"),
        (tensors | {name.replace("up_proj", "x"): tensors[name].clone()}, r"has \S*mlp\.x\.weight"),
        (
            tensors | {"model.layers.1.mlp.up_proj.weight": tensors[name].clone()},
            "are two names of the same tensor",
        ),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(TandemError, match=says):
            check(tmp_path)


def check(path: Path) -> None:
    folder = read_folder(path)
    check_weights(folder.weight_files, folder.config)
