#!/bin/sh
# OpenVINO GenAI, in an environment of its own.
#
#     benchmarks/peers/install_openvino.sh [folder, default ~/.cache/tandem/peers/openvino]
set -e
environment="${1:-$HOME/.cache/tandem/peers/openvino}"
pip="$environment/bin/python -m pip --disable-pip-version-check"
${PYTHON:-python3} -m venv "$environment"
$pip install openvino-genai==2026.4.1.0
"$environment/bin/python" -c "import openvino_genai; print('openvino-genai', openvino_genai.__version__)"
