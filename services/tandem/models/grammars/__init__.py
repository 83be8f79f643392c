"""Structured output: grammars, and the masks that keep a completion within its grammar.

    text.py      what a client asks for, as one grammar text (the router)
    compiler.py  compiles a grammar text for a model's vocabulary, within limits (both)
    masks.py     follows completions, and makes the mask of each next token (the engine)

A grammar text and the tokens of the completion decide the mask: a sequence that was moved,
preempted or prefilled elsewhere goes on as it would have.
"""
