#!/bin/sh
# llama.cpp by its Python binding, compiled for this processor, in an environment of its own
# (11 minutes on 2 cores).
#
#     benchmarks/peers/install_llama_cpp.sh [folder, default ~/.cache/tandem/peers/llama-cpp]
set -e
environment="${1:-$HOME/.cache/tandem/peers/llama-cpp}"
pip="$environment/bin/python -m pip --disable-pip-version-check"
${PYTHON:-python3} -m venv "$environment"
CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" $pip install llama-cpp-python
"$environment/bin/python" -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
