"""Models for tests that need other files than the built-in model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer

# shaped like Qwen 3's template, with tool calls in Hermes' format
HERMES_TEMPLATE = """{%- if tools %}
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
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def with_template(folder: Path, template: str) -> Path:
    """Creates `folder` with the built-in model and another chat template."""
    folder.mkdir()
    for file in resolve("smollm2").path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def encode_chat(tokenizer: Tokenizer, *chat: Any, **flags: bool) -> list[int]:
    """Returns the token ids of a chat's prompt. The arguments are those of `render_prompt`."""
    return tokenizer.encode_rendered(tokenizer.render_prompt(*chat, **flags))
