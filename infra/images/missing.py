"""Print the pins of a lock file that this Python does not have yet: `missing.py requirements/base.lock`.

The images of vLLM and of PyTorch bring most packages, in versions that were tested together. Those stay as
they are; pip is given only what is missing. Needs nothing but Python.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].strip()
        if pin and not _is_installed(pin.partition("==")[0]):
            print(pin)


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
