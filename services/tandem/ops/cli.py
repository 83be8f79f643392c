"""The entry point of `tandem`. Ctrl-C ends a command without a traceback, even during imports."""

from tandem.common.process.early_end import quietly
from tandem.common.process.garbage import without_collection


def main() -> None:
    """Runs the command that the command line names."""
    quietly(_run)


def _run() -> None:
    # The import is inside this function, so that Ctrl-C during the import prints no traceback.
    with without_collection():
        from tandem.ops.commands import run

    run()


if __name__ == "__main__":
    main()
