"""The entry point of `tandem`. Ctrl-C ends a command without a traceback, even during imports."""

from tandem.common.process.early_end import quietly
from tandem.common.process.garbage import without_collection


def main() -> None:
    """Runs the command that the process's arguments name."""
    quietly(_run)


def _run() -> None:
    # Imported here, so that Ctrl-C during the import is handled, too.
    with without_collection():
        from tandem.ops.commands import run

    run()


if __name__ == "__main__":
    main()
