"""Tidemill: reinforcement learning for language models, as services that meet in Redis Streams.

    import tidemill

    result = tidemill.run("config.yaml", {"trainer.steps": 20}, on_step=lambda step: print(step["reward"]))
    tidemill.History(result.run_id).samples().to_pandas()

Names are imported when they are first asked for: `import tidemill` itself imports nothing. docs/api.md has
them all. `tidemill.common` and `tidemill.services` are not part of what stays the same between releases.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.common.config import RunConfig
    from tidemill.common.errors import ConfigError, TidemillError
    from tidemill.services.console.api.history import History, Records, metrics
    from tidemill.services.console.api.running import RunResult, check, load_config, rescore, run, run_async

__all__ = [
    "ConfigError",
    "History",
    "Records",
    "RunConfig",
    "RunResult",
    "TidemillError",
    "check",
    "load_config",
    "metrics",
    "rescore",
    "run",
    "run_async",
]
_API = "services.console.api"
_PLACES = {
    "RunConfig": "common.config",
    "ConfigError": "common.errors",
    "TidemillError": "common.errors",
    "History": f"{_API}.history",
    "metrics": f"{_API}.history",
    "Records": f"{_API}.history",
}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported now; `__version__` of what is installed."""
    if name == "__version__":
        from importlib.metadata import version

        return version("tidemill")
    if name not in __all__:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"tidemill.{_PLACES.get(name, f'{_API}.running')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
