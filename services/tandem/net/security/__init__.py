"""Access control: API keys, limits on clients and on request bodies, the audit trail, and a TLS
port in front of Redis."""
