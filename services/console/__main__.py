"""The `tidemill` command: runs a command of commands.py; an error of the user ends with a message alone."""

import gc
import sys
from typing import Annotated

import typer

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.privacy import hide_memory
from tidemill.services.console.commands import app


def print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tidemill {version('tidemill')}")
        except PackageNotFoundError:
            print("tidemill, not installed: a clone")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=print_version, help="Print the version"),
    ] = False,
) -> None:
    """What goes before any command."""


def main() -> None:
    hide_memory()  # the environment of any command may have the password of Redis, and tokens of servers
    try:
        app()
    except TidemillError as error:
        message = str(error)
        meanings = ""
        if isinstance(error, ConfigError) and error.unknown_fields:
            from tidemill.services.console.convert.table import names_elsewhere, without_guesses

            meanings = names_elsewhere(error.unknown_fields)
            message = without_guesses(message, error.guesses)
        print(f"tidemill: {message}", file=sys.stderr)
        print(meanings, end="", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"tidemill: {error.filename}: {error.strerror}. Check the path, whose it is, and its disk.",
            file=sys.stderr,
        )
        sys.exit(ConfigError.exit_code)
    finally:
        # Skips the garbage collection at exit, which would visit the objects of all modules.
        gc.freeze()


if __name__ == "__main__":
    main()
