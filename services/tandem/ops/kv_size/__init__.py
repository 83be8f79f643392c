"""`tandem kv-size`: computes the size of a model's KV and the workers that a load needs."""
