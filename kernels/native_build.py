"""Compiles the CPU kernels, which are in C++ and need neither torch nor Python's headers.

    python kernels/native_build.py            compiles them into the cache

setup.py takes the objects from the cache and links them. deploy/install.py runs this program while
packages are downloaded, so that an install does not wait for the compiler.

The kernels exist once for each instruction set, and a set takes half a minute to compile. Wheels
and images have the kernels for all sets. An editable install has those for the best set of this
processor. The environment variable TANDEM_NATIVE chooses other sets: `all`, or names separated by
commas.

The cache finds an object by a hash of everything that determines its bytes: the source, the
headers, the flags and the compiler.
"""

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "tandem_kernels" / "native"
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "neon", "plain")
VARIABLE = "TANDEM_NATIVE"
_COMMON = ("api", "blocks", "cpu", "pack", "pack_blocks")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi"),
    # Debug information would be most of the binary and a quarter of the compile time.
    "-g0",
    # Without this option, each compiler would fuse other products with sums. The sources name those
    # that are fused (simd.h), so that the bits depend neither on the compiler nor on the batch.
    "-ffp-contract=off",
)
_INSTALL_ONE = (
    "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in "
    "the variable CXX"
)
_KEPT = 60  # number of objects that the cache keeps; the oldest ones are removed


class BuildError(Exception):
    """The kernels cannot be compiled. The message says what to do."""


def check() -> None:
    """Compiles a program of a few lines with the kernels' flags. Raises BuildError if there is no
    compiler, or if the compiler lacks C++'s library or OpenMP."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text("#include <omp.h>\n#include <vector>\nint main() { return 0; }\n")
        try:
            _run([*compiler, *_FLAGS, "-shared", str(source), "-o", str(source.with_suffix(".so"))])
        except BuildError as error:
            errors = [line for line in str(error).splitlines() if "error" in line]
            raise BuildError(
                f"the C++ compiler {' '.join(compiler)} cannot compile a program of two lines "
                f"({(errors or [str(error)])[0].strip()}). {_INSTALL_ONE}"
            ) from None


def cache_root() -> Path:
    """Returns Tandem's cache folder, the same as tandem.models.gguf.convert.cache_root does."""
    if named := os.environ.get("TANDEM_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def wanted_sets(*, all_by_default: bool) -> tuple[str, ...]:
    """Returns the instruction sets to compile. Raises BuildError for a wrong TANDEM_NATIVE."""
    named = os.environ.get(VARIABLE, "")
    if named == "all" or (not named and all_by_default):
        return INSTRUCTION_SETS
    if not named:
        return (best_set(),)
    sets = tuple(named.split(","))
    if unknown := [name for name in sets if name not in INSTRUCTION_SETS]:
        allowed = ", ".join(("all", *INSTRUCTION_SETS))
        raise BuildError(f"{VARIABLE} names {unknown[0]!r}; allowed are {allowed}")
    return sets


def best_set() -> str:
    """Returns the best instruction set of this processor."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cpu.so"
        _run([*_compiler(), "-shared", "-fPIC", str(SOURCES / "cpu.cpp"), "-o", str(library)])
        best = ctypes.CDLL(str(library)).tandem_best_instructions
        best.restype = ctypes.c_char_p
        return str(best().decode())


def build(target: Path, sets: Sequence[str]) -> None:
    """Links the library `target` with these instruction sets. Raises BuildError."""
    objects = [str(path) for path in compile_objects(sets)]
    _run([*_compiler(), "-shared", "-fopenmp", *objects, "-o", str(target)])


def compile_objects(sets: Sequence[str]) -> list[Path]:
    """Compiles the sources whose object files the cache lacks, on all cores. Returns the object
    files of all sources. Raises BuildError."""
    compiler = _compiler()
    identity = hashlib.sha256(_run([*compiler, "--version"]).encode())
    for header in sorted(SOURCES.glob("*.h")):
        identity.update(header.read_bytes())
    folder = _cache_folder()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = threads.map(
            # The kernels of instruction sets come first, because they take longest to compile.
            lambda name: _object(name, sets, compiler, identity.hexdigest(), folder),
            (*sets, *(f"state_{name}" for name in sets), *_COMMON),
        )
        objects = list(made)
    _forget_old(folder, objects)
    return objects


def _object(
    name: str, sets: Sequence[str], compiler: Sequence[str], identity: str, folder: Path
) -> Path:
    flags = [*_FLAGS, *(f"-DTANDEM_HAS_{each.upper()}" for each in sets if name == "api")]
    source = SOURCES / f"{name}.cpp"
    key = hashlib.sha256(" ".join((identity, *compiler, *flags)).encode())
    key.update(source.read_bytes())
    kept = folder / f"{name}-{key.hexdigest()[:32]}.o"
    if kept.exists():
        os.utime(kept)
        return kept
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        made = Path(unfinished) / kept.name
        _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
        made.replace(kept)
    return kept


def _compiler() -> list[str]:
    """Returns the command of the C++ compiler: the environment variable CXX if it is set, or else
    the system's compiler."""
    if named := os.environ.get("CXX"):
        return named.split()
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError(f"no C++ compiler is found, which the CPU kernels need. {_INSTALL_ONE}")


def _cache_folder() -> Path:
    """Returns a writable folder for objects: the cache, or else one that is removed when
    this program ends."""
    folder = cache_root() / "objects"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="tandem-objects-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary


def _forget_old(folder: Path, used: Sequence[Path]) -> None:
    by_age = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-_KEPT]:
        if path not in used:
            path.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Compiles the kernels of an editable install into the cache."""
    began = time.monotonic()
    try:
        sets = wanted_sets(all_by_default=False)
        compile_objects(sets)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"CPU kernels for {', '.join(sets)} are compiled ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
