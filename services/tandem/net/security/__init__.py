"""API keys: which calls they allow, and how a router loads them. Independent of HTTP and gRPC."""
