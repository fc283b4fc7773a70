#!/bin/sh
# What a trainer on GPUs is fast with: kernels.sh, as root, while an image is built. On torch for CPUs it does nothing.
# Triton and torch.compile build with a C compiler and Python.h, which PyTorch's image lacks; Liger's fused kernels are
# pure Triton. Attention of packed sequences is torch's own (varlen_attn): flash-attn has to be built, and is not needed.
set -eu
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
python3 -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || exit 0
apt-get update
apt-get install -y --no-install-recommends gcc g++ libc6-dev
headers='import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
python3 -c "$headers" || apt-get install -y --no-install-recommends python3-dev
rm -rf /var/lib/apt/lists/*
python3 -c "$headers"
python3 -m pip install --no-deps "liger-kernel==0.8.5"
