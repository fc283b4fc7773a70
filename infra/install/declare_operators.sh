#!/usr/bin/env bash
# declare_operators.sh FOLDER: makes the torchvision in FOLDER, whose compiled operators are those of a CUDA build, one
# that imports beside CPU torch, too: two of their names are needed at the import. No image processor calls them.
set -euo pipefail
cat >> "$1/torchvision/extension.py" <<'END'


# Added by infra/install/declare_operators.sh.
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
