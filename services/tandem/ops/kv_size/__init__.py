"""`tandem kv-size`: computes the memory of KV, and the workers of a load, before anything runs."""
