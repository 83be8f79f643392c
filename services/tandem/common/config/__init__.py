"""Settings of every process: frozen dataclasses, composed for each role and checked once at
startup.

They are set by command lines and the Helm chart. A field is an option of its program unless it is a
`Constant` (`options.py`). Secrets (Redis's URL, the cluster's token) come from the environment, so
that process lists do not show them.
"""
