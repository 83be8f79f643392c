"""Who may do what: API keys, and how a router learns of them. Knows no HTTP and no gRPC."""
