"""API keys say who may do what, and how a router learns of them. Knows no HTTP and no gRPC."""
