"""Structured output: grammars, and the token masks that keep a completion within its grammar.

    text.py      converts a client's response format to one grammar text (router)
    compiler.py  compiles a grammar text for a model's vocabulary, within limits (router and engine)
    masks.py     tracks completions and computes the mask of each next token (engine)

A mask depends only on the grammar text and the completion's tokens. A sequence that is migrated,
preempted or prefilled by another worker therefore continues with the same masks.
"""
