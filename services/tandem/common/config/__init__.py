"""Settings of every process, as frozen dataclasses. Each program composes its settings from these
classes and checks them once at startup.

Command lines and the Helm chart set the settings. A field is an option of its program unless it is
a `Constant` (`options.py`). Secrets (Redis's URL, the cluster's token) come from the environment,
so that process lists do not show them.
"""
