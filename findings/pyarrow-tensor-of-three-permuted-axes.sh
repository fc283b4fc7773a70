#!/usr/bin/env bash
# pyarrow: to_numpy_ndarray of a fixed-shape tensor column whose permutation is a cycle of three axes reads some numbers twice
# and others never; to_numpy of one scalar of the same column is right. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pyarrow==26.0.1 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
import numpy as np
import pyarrow as pa

kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 2], permutation=[2, 0, 1])
column = pa.ExtensionArray.from_storage(kind, pa.array([list(range(12))], pa.list_(pa.int32(), 12)))
array, scalar = column.to_numpy_ndarray()[0].tolist(), column[0].to_numpy().tolist()
right = np.arange(12).reshape(2, 3, 2).transpose(2, 0, 1).tolist()
print("pyarrow", pa.__version__)
print("expected:           ", right)
print("scalar.to_numpy:    ", scalar)
print("to_numpy_ndarray[0]:", array)
sys.exit(0 if scalar == right and array == [[[0, 2, 4], [4, 6, 8]], [[1, 3, 5], [5, 7, 9]]] else 1)
PYTHON
echo "as described"
