"""API keys: which calls they allow, and how a router loads them. The package does not depend on
HTTP or gRPC."""
