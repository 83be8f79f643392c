#!/bin/sh
# zentorch, AMD's plug-in of torch, with the torch that it was built for, in an environment of its own.
#
#     benchmarks/peers/install_zentorch.sh [folder, default ~/.cache/tandem/peers/zentorch]
set -e
environment="${1:-$HOME/.cache/tandem/peers/zentorch}"
pip="$environment/bin/python -m pip --disable-pip-version-check"
${PYTHON:-python3} -m venv "$environment"
$pip install torch==2.13.0 zentorch==2.13.0.2 transformers==5.23.0 accelerate
"$environment/bin/python" -c "import torch, zentorch; print('zentorch', zentorch.__version__, 'torch', torch.__version__)"
