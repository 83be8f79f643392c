"""The program of the engine process. The I/O process of a worker starts it (program.py)."""

from tandem.common.process.garbage import without_collection

if __name__ == "__main__":
    with without_collection():
        from tandem.worker.engine_process.process import main
    main()
