"""Lua scripts, run by a real Lua 5.1, as in Redis."""

import hashlib
from collections.abc import Callable
from typing import Any

from lupa import lua51
from redis.exceptions import NoScriptError, ResponseError

from tests.simulation.redis.keyspace import Keyspace

_WRAPPED = "function(KEYS, ARGV)\n%s\nend"


class Scripts:
    """Compiled scripts, shared by all servers of a process; each server keeps which ones it knows."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._compiled: dict[bytes, Any] = {}
        self._space: Keyspace | None = None
        make = self._lua.execute(
            b"""
            return function(call, pcall)
              redis = {call = call, pcall = pcall}
              redis.error_reply = function(text) return {err = text} end
              redis.status_reply = function(text) return {ok = text} end
            end
            """
        )
        make(self._call, self._protected_call)

    def compile(self, source: bytes) -> bytes:
        """Keep a script; returns its SHA1."""
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        if sha not in self._compiled:
            try:
                self._compiled[sha] = self._lua.eval(_WRAPPED.encode() % source)
            except lua51.LuaError as error:
                raise ResponseError(f"Error compiling script (new function): {error}") from None
        return sha

    def run(self, space: Keyspace, sha: bytes, keys: list[bytes], args: list[bytes]) -> Any:
        """Run a script to its end: nothing comes between its commands."""
        if sha not in self._compiled:
            raise NoScriptError("No matching script. Please use EVAL.")
        before = self._space
        self._space = space
        try:
            return _to_python(self._compiled[sha](self._lua.table_from(keys), self._lua.table_from(args)))
        except lua51.LuaError as error:
            raise ResponseError(f"{error} script: {sha.decode()}") from None
        finally:
            self._space = before

    def _call(self, *args: Any) -> Any:
        assert self._space is not None
        return self._to_lua(self._space.call([_argument(arg) for arg in args]))

    def _protected_call(self, *args: Any) -> Any:
        try:
            return self._call(*args)
        except ResponseError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(item) for item in reply])
        return reply


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ResponseError("Lua redis lib command arguments must be strings or integers")
    return b"%d" % value if value == int(value) else b"%.17g" % value


def _to_python(value: Any) -> Any:
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, float):
        return int(value)
    if lua51.lua_type(value) != "table":
        return value
    if (error := value[b"err"]) is not None:
        raise ResponseError(error.decode())
    if (status := value[b"ok"]) is not None:
        return status
    items: list[Any] = []
    while (item := value[len(items) + 1]) is not None:
        items.append(_to_python(item))
    return items


EvalSha = Callable[[bytes, list[bytes], list[bytes]], Any]
