"""Tandem: LLM serving with prefill and decode on separate workers. Start at services/README.md."""
