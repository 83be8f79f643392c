"""Settings of every process: frozen dataclasses, composed per role, checked once at start.

Command lines and the Helm chart set these; nothing mutates them afterwards. A field is an option of
its program unless it is a `Constant`: `options.py`. Secrets (the URL of Redis, the cluster's token)
come from the environment, so that no process list shows them.
"""
