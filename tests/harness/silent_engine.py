"""An engine process that never reports that it is ready: `python -m
tests.harness.silent_engine`."""

import signal

if __name__ == "__main__":
    signal.pause()
