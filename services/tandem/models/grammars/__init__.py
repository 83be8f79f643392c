"""Structured output: grammars, and the token masks that keep a completion within its grammar.

- text.py converts a client's response format to one grammar text. The router uses it.
- compiler.py compiles a grammar text for a model's vocabulary, within limits. The router and the
  engine use it.
- masks.py tracks completions and computes the mask of each next token. The engine uses it.

A mask depends only on the grammar text and the completion's tokens. A sequence that is migrated,
preempted or prefilled by another worker therefore continues with the same masks.
"""
