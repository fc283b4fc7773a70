"""Files that are made from the code: pages, dashboards, a drawing."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path


def keep(
    files: Mapping[Path, str], command: str, arguments: Sequence[str], gone: Collection[Path] = ()
) -> int:
    """Write the files whose text has changed and remove those that are `gone`, or with `--check` only name
    them. Returns the exit code."""
    changed = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in (*changed, *gone):
        if "--check" in arguments:
            print(f"{path.name} is not current: python -m {command}")
        elif path in gone:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            print(f"{path.name} written")
    return int("--check" in arguments and bool(changed or gone))
