"""Runs statements that test untrusted code; the code runs in a process of its own.

Standard library only: this file is the program that the jail runs. The two processes exchange lines of JSON
over a socket. Plain values (numbers, texts, lists, dicts, ...) are copied, so that Python compares them, not
the code. All other objects stay in their process, and the other one gets a `Proxy`. So the code decides how
its own objects compare with each other (`__eq__`, `__lt__`) and whether they are true (`__bool__`,
`__len__`), and never whether one of them equals, or is less than, a plain value.

The code's process is forked before the tests are read, and cannot read the memory of the tests' process.
"""

import builtins
import ctypes
import importlib
import json
import os
import socket
import sys
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

PR_SET_DUMPABLE = 4
COPIED: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "bytearray": bytearray,
    "range": lambda parts: range(*parts), "complex": lambda parts: complex(*parts),
    "dict": lambda pairs: {key: value for key, value in pairs}, "int": lambda parts: int(parts[0], 16),
    "Decimal": lambda parts: Decimal(parts[0]), "Fraction": lambda parts: Fraction(parts[0]),
}  # fmt: skip
CHANGING = (list, dict, set, bytearray)
INNER = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""Prefixes of attributes that lead from an object of the tests to the tests themselves."""
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "radd", "rsub",
    "rmul", "rtruediv", "neg", "pos", "abs", "invert", "len", "iter", "next", "getitem", "setitem",
    "delitem", "contains", "str", "repr", "hash", "enter", "exit", "int", "float", "round",
)  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Proxy:
    """Represents an object of the other process. It never equals a plain value."""

    def __init__(self, peer: "Peer", number: int) -> None:
        vars(self).update(_peer=peer, _number=number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the object in its process; changes to mutable positional arguments are copied back."""
        result, changed = self._peer.ask("call", self._number, args, named)
        for own, other in zip(args, changed, strict=True):
            if isinstance(own, list | bytearray):
                own[:] = other
            elif isinstance(own, dict | set):
                own.clear()
                own.update(other)
        return result

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return self._peer.ask("instance", self._number, value) is True

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self._number) is True


def _operator(name: str) -> Any:
    def apply(self: Proxy, *others: Any) -> Any:
        return self._peer.ask("operator", self._number, f"__{name}__", others)

    return apply


def _comparison(name: str) -> Any:
    def compare(self: Proxy, other: Any) -> Any:
        if not isinstance(other, Proxy):
            return NotImplemented
        return self._peer.ask("operator", self._number, f"__{name}__", (other,))

    return compare


for _name in OPERATORS:
    setattr(Proxy, f"__{_name}__", _operator(_name))
for _name in COMPARISONS:
    setattr(Proxy, f"__{_name}__", _comparison(_name))


class Peer:
    """One end of the socket. If `is_guarded`, it refuses `INNER` attributes of objects held here."""

    def __init__(self, channel: socket.socket, is_guarded: bool) -> None:
        self._stream, self._is_guarded = channel.makefile("rwb"), is_guarded
        self._held: list[Any] = []
        self.exceptions: dict[str, type[BaseException]] = {}

    def ask(self, *request: Any) -> Any:
        """Send a request and wait for its result; requests of the other end are served meanwhile."""
        self._write(["ask", self.encode(request)])
        while True:
            kind, content = json.loads(self._stream.readline() or '["gone", null]')
            if kind == "answer":
                return self.decode(content)
            if kind == "raised":
                names, text = content
                known = (self.exceptions.get(name) or getattr(builtins, name, None) for name in names)
                raise next(
                    (e for e in known if isinstance(e, type) and issubclass(e, Exception)), RuntimeError
                )(text)
            if kind != "ask":
                raise EOFError("the code has ended its process")
            self._serve(content)

    def serve(self) -> None:
        """Serve requests until the other end closes the socket."""
        while line := self._stream.readline():
            self._serve(json.loads(line)[1])

    def encode(self, value: Any) -> Any:
        """The value as JSON; an object that is not plain is kept here, and its number is sent."""
        if value is None or type(value) in (bool, float, str):
            return value
        if isinstance(value, Proxy):
            return ["yours", value._number]
        if isinstance(value, dict):
            # By the plain type's own methods, here and below: a subclass of the code may override them.
            return ["dict", [[self.encode(key), self.encode(inner)] for key, inner in dict.items(value)]]
        kinds: tuple[Any, ...] = (list, tuple, set, frozenset, bytes, bytearray)
        for kind in kinds:
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(inner) for inner in kind.__iter__(value)]]
        if isinstance(value, range):
            return ["range", [value.start, value.stop, value.step]]
        if isinstance(value, Decimal | Fraction):
            return [type(value).__name__, [str(value)]]
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, float | str):
            return float(value) if isinstance(value, float) else str.__str__(value)
        if isinstance(value, int) or (hasattr(value, "__index__") and not isinstance(value, type)):
            return ["int", [hex(value)]]
        self._held.append(value)
        return ["mine", len(self._held) - 1]

    def decode(self, value: Any) -> Any:
        """The value, or a proxy of an object that the other end holds."""
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "mine":
            return Proxy(self, int(content))
        if kind == "yours":
            return self._held[int(content)]
        return COPIED[kind]([self.decode(inner) for inner in content] if kind != "dict" else
                            [(self.decode(key), self.decode(inner)) for key, inner in content])  # fmt: skip

    def _serve(self, content: Any) -> None:
        try:
            answer = ["answer", self.encode(self._done(*self.decode(content)))]
        except Exception as error:
            answer = ["raised", [[each.__name__ for each in type(error).__mro__], str(error)]]
        self._write(answer)

    def _done(self, what: str, number: int, *rest: Any) -> Any:
        held = self._held[number]
        if what == "call":
            args, named = rest
            result = held(*args, **named)
            return result, [arg if isinstance(arg, CHANGING) else None for arg in args]
        if what == "bool":
            return bool(held)
        if what == "instance":
            return isinstance(rest[0], held)
        name, *values = rest
        if what == "operator":
            special = getattr(type(held), name, None)
            return NotImplemented if special is None else special(held, *values[0])
        if self._is_guarded and name.startswith(INNER):
            raise AttributeError(name)
        return getattr(held, name) if what == "get" else setattr(held, name, values[0])

    def _write(self, tree: Any) -> None:
        self._stream.write(json.dumps(tree).encode() + b"\n")
        self._stream.flush()


class Solution:
    """The code and its globals, in the code's process."""

    def __init__(self, peer: Peer) -> None:
        self._scope: dict[str, Any] = {"__name__": "__solution__"}
        peer.encode(self)  # number 0

    def run(self, code: str) -> "list[tuple[str, str, Any]]":
        """Run the code. Returns (name, kind, value) of each global; `_scope_of` rebuilds them."""
        exec(compile(code, "solution.py", "exec"), self._scope)
        return [(name, *_described(value)) for name, value in self._scope.items() if name[:2] != "__"]


def _described(value: Any) -> "tuple[str, Any]":
    if isinstance(value, ModuleType):
        return "module", value.__name__
    if isinstance(value, type) and issubclass(value, Exception):
        return "exception", [each.__name__ for each in value.__mro__]
    module = getattr(value, "__module__", None) or ""
    if module.partition(".")[0] in sys.stdlib_module_names and hasattr(value, "__qualname__"):
        return "import", [module, value.__qualname__]
    return "value", value


def _scope_of(names: "list[tuple[str, str, Any]]", peer: Peer) -> "dict[str, Any]":
    """The statements' globals, from those of the code. What the code has imported is imported here again."""
    scope: dict[str, Any] = {"__name__": "__test__"}
    for name, kind, value in names:
        if hasattr(builtins, name):
            continue  # the code must not replace a built-in of the statements
        if kind == "module":
            scope[name] = importlib.import_module(value)
        elif kind == "import":
            scope[name] = importlib.import_module(value[0])
            for part in value[1].split("."):
                scope[name] = getattr(scope[name], part)
        elif kind == "exception":
            known = (getattr(builtins, each, None) for each in value)
            base = next(each for each in known if isinstance(each, type) and issubclass(each, Exception))
            scope[name] = peer.exceptions[name] = type(name, (base,), {})
        else:
            scope[name] = value
    return scope


def main() -> None:
    """Read proof, code and statements from stdin; write the proof if the statements ran to the end."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the code must not read the tests out of this process
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        # Standard input holds the tests, which only the other process reads.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        peer = Peer(theirs, is_guarded=False)
        Solution(peer)
        peer.serve()
        os._exit(0)
    theirs.close()
    asked = json.load(sys.stdin)
    peer = Peer(ours, is_guarded=True)
    run = Proxy(peer, 0).run
    scope = _scope_of(run(asked["code"]), peer)
    exec(compile(asked["test"], "test.py", "exec"), scope)
    os.kill(child, 9)  # it must not write anything after the proof
    os.waitpid(child, 0)
    sys.stdout.write("\n" + asked["proof"])


if __name__ == "__main__":
    main()
