"""Empties a folder that hostile code has filled. Standard library only, like the jail itself."""

import contextlib
import os
import secrets

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def empty(folder: str) -> None:
    """Remove what is in the folder, as far as it can be removed; links are not followed.

    Folders in it may be nested deeper than a path can say or a function can call itself: what one holds is
    moved up before the folder is removed.
    """
    top = os.open(folder, FOLDER)
    try:
        names = os.listdir(top)
        while names:
            with contextlib.suppress(OSError):
                names += _remove(names.pop(), top)
    finally:
        os.close(top)


def _remove(name: str, top: int) -> list[str]:
    """Remove a file, or a folder; the names under which what it held lies in `top` now."""
    try:
        os.unlink(name, dir_fd=top)
        return []
    except IsADirectoryError:
        with contextlib.suppress(PermissionError):
            return _remove_folder(name, top)
    os.chmod(name, 0o700, dir_fd=top)
    return _remove_folder(name, top)


def _remove_folder(name: str, top: int) -> list[str]:
    folder = os.open(name, FOLDER, dir_fd=top)
    try:
        moved = {held: secrets.token_hex(16) for held in os.listdir(folder)}
        for held, new in moved.items():
            os.rename(held, new, src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
    return list(moved.values())
