"""Writes a tiny model with random weights for agents, with a context of 131,072 tokens and a chat
template like Qwen 2.5's.

    python tests/conformance/agent_model.py FOLDER

What the model says is random, so `clients/scripted.py` gives it the answers.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.models.source import resolve

CONTEXT = 131_072
# It writes calls and results as Qwen 2.5's template does. It has no reasoning, because a model with
# random weights would not end it.
_TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_model(folder: Path) -> None:
    """Writes the model into `folder`, with the tokenizer of the built-in model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2").path / name, folder / name)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
