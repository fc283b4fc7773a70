"""`tidemill export`: writes a version as a folder; without an output, lists the versions."""

from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.common.run.state import CONFIG_FILE
from tidemill.services.console.exports.weights import list_versions
from tidemill.services.console.options import ExportOptions
from tidemill.services.console.run.folder import find_run, nearest


def export(options: ExportOptions) -> int:
    if options.output is None:
        if options.version != "last":
            raise ConfigError("--version is of a folder to write: name it with -o FOLDER")
        return list_versions(options)
    if options.verify or options.as_json:
        raise ConfigError("--verify and --json are of the list of versions: leave out -o")
    folder = find_run(options.run_id, options.runs_dir)
    if (config := folder.config()) is None:
        raise ConfigError(
            f"{nearest(folder.path)} has no {CONFIG_FILE}: no such run here. Name the run, and its folder of "
            "runs with --runs-dir."
        )
    from tidemill.services.console.exports.model_folder import export_version

    result = export_version(folder.path, config.model, options.version, options.output.resolve())
    where, num_bytes = nearest(options.output.resolve()), result["num_bytes"]
    Console(highlight=False).print(
        f"version {result['version']} of {folder.run_id} is in [bold]{where}[/] ({num_bytes:,} bytes)",
        soft_wrap=True,
    )
    return 0
