"""Writes the tables of families.md: the properties of each family, and its test checkpoints.

    python -m docs.reference.families

A test compares them with services/tandem/models/config/families.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tandem.models.config.families import FAMILIES, Family
from tandem.models.gguf.config import ARCHITECTURES
from tests.tiny_models import families_of
from tests.unit.engine.executor.triton.test_families import KINDS, OTHERS
from tests.unit.models.gguf.test_families import files_of

PAGE = Path(__file__).with_suffix(".md")
_HAS = "family", "attention", "positions", "norms", "biases", "MLP", "factors", "GGUF"
_SHOWN = "family", "checkpoints", "on Triton", "GGUF files", "refused"


def page() -> str:
    """Returns the whole page with new tables; the text around them is kept."""
    text = PAGE.read_text("utf-8")
    has = [(f"`{name}`", *_has(name, family)) for name, family in FAMILIES.items()]
    shown = [(f"`{name}`", *_shown(name)) for name in FAMILIES]
    return _with_table(_with_table(text, _HAS, has), _SHOWN, shown)


def _has(name: str, family: Family) -> tuple[str, ...]:
    return (
        _attention(family),
        _positions(family),
        _norms(family),
        _biases(family),
        _mlp(family),
        _factors(family),
        ", ".join(f"`{each}`" for each in _gguf_names(name)),
    )


def _biases(family: Family) -> str:
    key = family.key_names.get("attention_bias", "attention_bias")
    return {
        "config": f"by `{key}`",
        "config_qkv": f"q, k, v by `{key}`",
        "config_apart": f"q, k, v by `{key}`, output by `attention_out_bias`",
        "qkv": "q, k, v",
        "none": "none",
    }[family.biases]


def _attention(family: Family) -> str:
    parts = {
        "none": "full",
        "all": "a window in all layers, or full",
        "switched": "full, or with `use_sliding_window` a window in all layers",
        "chosen": "full, or with `use_sliding_window` a window in some layers",
        "chunked": "in chunks, but for layers without positions",
        "pattern": f"a window, but for the last of each {family.pattern} layers",
    }
    words = ["latent" if family.is_latent else parts[family.windows]]
    if family.indexer == "blocks":
        words.append("in some layers to blocks of tokens that an indexer chooses")
    elif family.indexer:
        words.append("to tokens that an indexer chooses")
    if family.indexer == "shared":
        words.append("some layers use the choice of an earlier one")
    if family.linear:
        states = {
            "kimi_delta": "Kimi Delta Attention",
            "mamba2": "Mamba 2",
            "short_conv": "short convolutions",
        }
        kind = states.get(family.linear, "Gated DeltaNet")
        others = "full or a window" if family.windows == "pattern" else words[0]
        words = [f"{kind}, {others} in some layers"]
        if family.has_parallel_state:
            words = [f"full beside {kind} in all layers"]
        if family.has_single_parts:
            words[0] += ", none in the others"
    if family.has_attention_gates:
        words.append("gates on the output of full attention")
    if family.has_head_gates:
        words.append("gates on the output of each head")
    if family.has_gemma4_layers:
        words.append(
            "other heads in layers without a window; KV of earlier layers in the last ones"
        )
    if family.has_alt_up:
        words.append("KV of earlier layers in the last ones")
    if family.has_mimo_layers:
        words.append("the first has none; twice as many KV heads in layers with a window")
    if family.has_deepseek_v4_layers:
        words = ["a window in all layers; in some layers also compressed entries"]
        words.append("an indexer chooses entries; keys are values")
    if family.has_sinks:
        words.append("sinks")
    if family.has_caps and "attn_logit_softcapping" not in family.refuses:
        words.append("capped scores")
    return "; ".join(words)


def _positions(family: Family) -> str:
    if family.is_latent and family.rope_if != "never":
        return "in a key that all heads share"
    words = ["in all layers"]
    if family.has_no_rope_layers:
        words = ["none in some layers"]
    if family.rope_if == "never":
        words = ["none"]
    if family.rope_if == "named":
        words = ["in all layers or none, by `position_embedding_type`"]
    if family.rope_if == "given":
        words = ["in all layers, or none if `rope_theta` is null"]
    if family.rope_in_windows:
        words = ["in layers with a window"]
    if family.rope_in_windows == "or_all":
        words = ["in layers with a window, or in all if there are none"]
    if family.has_rope_by_kind:
        words = ["others in layers with a window"]
    if family.has_deepseek_v4_layers:
        words = ["others in layers without compressed entries"]
    if family.has_partial_rope:
        words[0] += ", in all or a part of each head"
    if family.has_rope_pairs:
        words.append("neighbouring elements are rotated together")
    if family.scalings != Family().scalings:
        words.append(f"scaled by {', '.join(family.scalings)}")
    return "; ".join(words)


def _norms(family: Family) -> str:
    where = "before and after" if family.norms.startswith("around") else family.norms
    if family.norms == "parallel":
        where = "before attention and the MLP, which are side by side"
    if family.norms == "single":
        where = "before each part"
    if family.norms == "after_attention":
        where = "after in layers with attention, before in the others"
    if family.centers_norms:
        where += ", LayerNorm"
    weights = f", with {family.norm_offset:g} + w" if family.norm_offset else ""
    of_heads = {
        "": "",
        "head": "; of each head of q and k",
        "all": "; of all of q, of all of k",
        "rotated": "; of each head of q and k after RoPE",
        "rotated_plain": "; of each head of q and k after RoPE, without weights",
    }
    has_latents = family.is_latent or family.has_deepseek_v4_layers
    latents = "; of latents" if has_latents else ""
    has_value_norms = family.has_gemma4_layers or family.has_alt_up
    latents += "; of values, without weights" if has_value_norms else ""
    return where + weights + of_heads[family.qk_norm] + latents


def _mlp(family: Family) -> str:
    layers = {
        "all": "experts",
        "steps": "experts, dense in some layers",
        "from": "dense, then experts",
        "types": "experts in the layers of `mlp_layer_types`",
        "range": "experts in some layers",
        "kinds": "dense or experts in layers of their own",
        "listed": "experts in some layers",
        "switched": "dense; with `enable_moe_block` experts, and the dense MLP beside them",
    }
    words = [layers[family.expert_layers] if family.experts else "dense"]
    if family.defaults.keys() & {"n_shared_experts", "shared_intermediate_size"}:
        words[0] += " beside a shared MLP"
    if family.experts == "nemotron":
        words[0] += " beside a shared MLP, without gates; squares of ReLU"
    if family.experts == "granite":
        words[0] += ", or dense"
    if family.has_shared_gate:
        words[0] += " beside a shared MLP with a gate"
    if family.experts == "gpt_oss":
        words[0] += " with biases, also in MXFP4"
    if family.is_corrected:
        scores = "sigmoids" if family.has_sigmoids else "softmaxes"
        if family.has_deepseek_v4_layers:
            scores = "a table of token ids, or by roots of softplus"
        words.append(f"chosen by {scores} with a correction")
    if family.weighs_inputs:
        words.append("weights multiply their inputs")
    if family.has_clamped_gates:
        words.append("clamped gates")
    if family.has_alt_up:
        words.append("sparse gates in some layers")
    if family.fused == "maybe_mlp":
        words.append("stored as one matrix or not")
    elif family.fused:
        others = ", and so are q, k, v" if family.fused == "all" else ""
        words.append(f"stored as one matrix{others}")
    if family.defaults.get("hidden_activation") == "gelu_pytorch_tanh":
        words.append("GELU")
    return "; ".join(words)


def _factors(family: Family) -> str:
    factors = {
        "": [],
        "granite": ["of embeddings, scores, residuals and logits"],
        "gemma": ["of embeddings and scores"],
        "gemma3n": [
            "of embeddings",
            "embeddings for each layer",
            "copies of the residual stream (AltUp, LAuReL)",
        ],
        "cohere": ["of logits"],
        "falcon_h1": ["of embeddings, logits and most products"],
    }
    scaled = {"all": "all layers", "no_rope": "layers without positions"}
    if family.query_scaling:
        factors[""] = [f"of queries, by position, in {scaled[family.query_scaling]}"]
    if family.has_deepseek_v4_layers:
        factors[""] = ["several residual streams (hyper-connections)"]
    if family.has_gemma4_layers:
        factors["gemma"] = ["of embeddings and layers", "embeddings for each layer"]
    words = [*factors[family.multipliers], *(["capped logits"] if family.has_caps else [])]
    return "; ".join(words)


def _gguf_names(name: str) -> list[str]:
    """Returns the values of general.architecture in GGUF files of the family."""
    # Other keys of the file distinguish these families.
    if name in ("MistralForCausalLM", "MixtralForCausalLM"):
        return ["llama"]
    if name == "DeepseekV3ForCausalLM":
        return ["deepseek2"]
    return [gguf for gguf, (architecture, _) in ARCHITECTURES.items() if architecture == name]


def _shown(name: str) -> tuple[str, ...]:
    tiny = families_of(name)
    on_triton = [
        each if each in KINDS else f"({each})" for each in tiny if each in (*KINDS, *OTHERS)
    ]
    refused = _refused(FAMILIES[name])
    return ", ".join(tiny), ", ".join(on_triton), ", ".join(files_of(name)), refused


def _refused(family: Family) -> str:
    """Returns the values of keys that the family refuses (`refuses` and `demands`)."""
    words = [f"`{key}`" for key in family.refuses]
    for key, allowed in family.demands.items():
        others = " or ".join(f"`{str(each).lower()}`" for each in allowed)
        words.append(f"`{key}` other than {others}")
    return "; ".join(words)


def _with_table(text: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns the text with the rows of the table that has these columns replaced."""
    head, *lines = (f"| {' | '.join(line)} |\n".replace("  ", " ") for line in (columns, *rows))
    rule = "|---" * len(columns) + "|\n"
    before, after = text.split(head)
    rest = after.splitlines(keepends=True)
    num_old = next((n for n, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return "".join([before, head, rule, *lines, *rest[num_old:]])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
