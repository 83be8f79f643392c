"""Runs tests of the CPU kernels for all instruction sets on a processor that lacks some of them.

    python -m tests.harness.emulated_kernels tests/unit/engine/executor/native [options of pytest]

The kernels are compiled from their own sources, but with the instructions of AVX-512 and AMX
written in C++ (folder `emulated`). The build takes minutes, and emulated kernels are slow; both say
nothing about speed. Ranks in other processes use the ordinary kernels.

The processor must have AVX2. The compiled library is kept in the cache folder for the next run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tandem_kernels.native import library

ROOT = Path(__file__).parents[2]
EMULATED = Path(__file__).with_name("emulated")
_LIBRARY = "TANDEM_TEST_EMULATED_KERNELS"  # the path of the emulated kernels
_EDITS = (
    # Replace the target by one that this processor has, and the intrinsics by functions.
    (
        r'#pragma GCC target\("avx512[^"]*"\)',
        '#pragma GCC target("avx2,fma,f16c")\n#include "avx512.h"',
    ),
    (r'target\("avx512vbmi"\)', 'target("avx2")'),
    # The processor and its operating system permit everything.
    (r'__builtin_cpu_supports\("(avx512|amx)[^"]*"\)', "true"),
    (r"syscall\(SYS_arch_prctl, kRequestPermission, kTileData\) == 0", "true"),
)


def build() -> Path:
    """Compiles the kernels of all instruction sets, if that was not done yet. Returns the path of
    the library. Raises BuildError."""
    sys.path.insert(0, str(ROOT / "kernels"))
    import native_build

    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        for path in (*native_build.SOURCES.glob("*.h"), *native_build.SOURCES.glob("*.cpp")):
            text = path.read_text()
            for pattern, replacement in _EDITS:
                text = re.sub(pattern, replacement, text)
            (sources / path.name).write_text(text)
        for path in EMULATED.glob("*.h"):  # amx.h is replaced
            shutil.copy(path, sources)
        digest = hashlib.sha256()
        for path in sorted(sources.iterdir()):
            digest.update(path.read_bytes())
        target = native_build.cache_root() / "objects" / f"emulated-{digest.hexdigest()[:32]}.so"
        if not target.exists():
            native_build.SOURCES = sources
            # With -O3, the emulated vectors take ten times as long to compile.
            native_build._FLAGS = ("-O1", *(f for f in native_build._FLAGS if f != "-O3"))
            native_build.build(target, native_build.INSTRUCTION_SETS)
    return target


def pytest_configure() -> None:
    """As a plugin of pytest: test modules, which are imported later, get the emulated kernels."""
    emulated = library.Library(Path(os.environ[_LIBRARY]))
    library.load = lambda: emulated  # type: ignore[assignment]


def main() -> int:
    path = build()
    command = [sys.executable, "-m", "pytest", "-p", "tests.harness.emulated_kernels"]
    environment = {**os.environ, _LIBRARY: str(path), "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *sys.argv[1:]], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
