"""The folder of clients' files and batches if `tandem up` gets no --files-url."""

from collections.abc import Callable
from dataclasses import replace

from tandem.cluster.launch.options import LaunchOptions
from tandem.cluster.logs.run_logs import state_folder
from tandem.errors import ConfigError
from tandem.net.files.folder import FolderStore


def with_files(options: LaunchOptions, say: Callable[[str], None]) -> LaunchOptions:
    """Returns the options with a folder for files. The folder outlives the run, so a later run with
    the same --port continues its batches. With --listen, routers of other machines could not read
    the folder, so there is no default. If the folder cannot be used, `say` gets the reason, and the
    cluster keeps no files."""
    if options.files.files_url or options.listen:
        return options
    folder = state_folder() / "files" / str(options.http_port)
    try:
        FolderStore(folder, "files-url")
    except ConfigError as error:
        say(f"/v1/files and /v1/batches are not served: {error.message}")
        return options
    return replace(options, files=replace(options.files, files_url=str(folder)))
