"""Runs statements that test untrusted code; the code runs in a process of its own.

Standard library only: this file is the program that the jail runs. The two processes exchange lines of JSON
over a socket. Plain values (numbers, texts, lists, dicts, dates, arrays of numpy, ...) are copied, so that
Python compares them, not the code. All other objects stay in their process, and the other one gets a `Proxy`.
So the code decides how its own objects compare with each other (`__eq__`, `__lt__`) and whether they are true
(`__bool__`, `__len__`), and never whether one of them equals, or is less than, a plain value.

The code's process is forked before the tests are read, and cannot read the memory of the tests' process.
"""

import builtins
import collections
import ctypes
import datetime
import importlib
import json
import numbers
import os
import re
import socket
import sys
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

PR_SET_DUMPABLE = 4
CODE_MODULES = ("solution", "solutions", "submission", "candidate", "your_module", "my_module")
"""As in `statement_checks.py`, which says what stands for the code."""
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple)}
"""What a copied defaultdict may make of missing keys."""
DTYPE = re.compile(r"[<>|=]?[biufcUS][0-9]{1,4}")
DATES = ("date", "datetime", "time")


def _namedtuple(name: str, fields: "list[str]", values: "list[Any]") -> Any:
    return collections.namedtuple(name, fields)(*values)


def _array(dtype: str, shape: Any, values: Any) -> Any:
    """An array of numpy; a list where the tests cannot have numpy."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return values
    if DTYPE.fullmatch(dtype) is None:
        raise ValueError(f"an array of dtype {dtype}")
    return numpy.array(values, dtype=dtype).reshape(shape)


COPIED: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "bytearray": bytearray,
    "range": lambda parts: range(*parts), "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
    "dict": dict, "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "OrderedDict": collections.OrderedDict, "int": lambda parts: int(parts[0], 16),
    "defaultdict": lambda parts: collections.defaultdict(FACTORIES.get(parts[0]), parts[1]),
    "deque": lambda parts: collections.deque(parts[0], parts[1]),
    "namedtuple": lambda parts: _namedtuple(*parts),
    "Decimal": lambda parts: Decimal(parts[0]), "Fraction": lambda parts: Fraction(parts[0]),
    "timedelta": lambda parts: datetime.timedelta(*parts), "array": lambda parts: _array(*parts),
    "number": lambda parts: _array(parts[0], (), parts[1])[()],
    **{name: lambda parts, name=name: getattr(datetime, name).fromisoformat(parts[0]) for name in DATES},
}  # fmt: skip
PAIRS = ("dict", "Counter", "OrderedDict")
CHANGING = (list, dict, set, bytearray, collections.deque)
INNER = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""Prefixes of attributes that lead from an object of the tests to the tests themselves."""
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "radd", "rsub",
    "rmul", "rtruediv", "neg", "pos", "abs", "invert", "len", "iter", "next", "getitem", "setitem",
    "delitem", "contains", "str", "repr", "hash", "enter", "exit", "int", "float", "round", "format",
)  # fmt: skip
ARITHMETIC = OPERATORS[: OPERATORS.index("neg")]
"""Operators with another operand."""
DIFFERENCES = ("sub", "rsub", "add", "radd")
"""What they make of an object and a number must not become a number in a second step either."""
LOOKED_AT = ("len", "hash", "getitem", "next", "contains")
"""They ask an object for what it has, and make no number of it."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SPECIAL = frozenset(f"__{name}__" for name in (*OPERATORS, *COMPARISONS))
"""The only special methods that the other process may call, for `__getattribute__` leads to every
attribute."""


class Proxy:
    """Represents an object of the other process. It never equals a plain value."""

    def __init__(self, peer: "Peer", number: int) -> None:
        vars(self).update(_peer=peer, _number=number, _is_difference=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the object in its process; changes to mutable positional arguments are copied back."""
        result, changed = self._peer.ask("call", self._number, args, named)
        for argument, content in zip(args, changed, strict=True):
            if isinstance(argument, list | bytearray):
                argument[:] = content
            elif isinstance(argument, collections.deque):
                argument.clear()
                argument.extend(content)
            elif isinstance(argument, dict | set):
                argument.clear()
                argument.update(content)
        return result

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return self._peer.ask("instance", self._number, value) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return self._peer.ask("subclass", self._number, value) is True

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self._number) is True


def _operator(name: str) -> Any:
    def apply(self: Proxy, *others: Any) -> Any:
        result = self._peer.ask("operator", self._number, f"__{name}__", others)
        # The object has seen the number that is expected: `abs(f(1) - 2) < 1e-6` would be its word.
        has_seen_numbers = self._is_difference or (name in ARITHMETIC and all(map(_is_number, others)))
        if has_seen_numbers and _is_number(result) and name not in LOOKED_AT:
            raise TypeError(f"an object of the code makes a number of a number, by __{name}__")
        if isinstance(result, Proxy) and has_seen_numbers and (self._is_difference or name in DIFFERENCES):
            vars(result)["_is_difference"] = True
        return result

    return apply


def _is_number(value: Any) -> bool:
    """Whether it is a number, or an array of numbers."""
    return isinstance(value, numbers.Number) or hasattr(type(value), "dtype")


def _comparison(name: str) -> Any:
    def compare(self: Proxy, operand: Any) -> Any:
        if not isinstance(operand, Proxy):
            return NotImplemented
        return self._peer.ask("operator", self._number, f"__{name}__", (operand,))

    return compare


for _name in OPERATORS:
    setattr(Proxy, f"__{_name}__", _operator(_name))
for _name in COMPARISONS:
    setattr(Proxy, f"__{_name}__", _comparison(_name))


class Peer:
    """One end of the socket. If `is_guarded`, it refuses `INNER` attributes of objects held here."""

    def __init__(self, channel: socket.socket, is_guarded: bool) -> None:
        self._stream = channel.makefile("rwb")
        self._is_guarded = is_guarded
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Proxy] = {}
        self.exceptions: dict[str, type[BaseException]] = {}

    def ask(self, *request: Any) -> Any:
        """Send a request and wait for its result; requests of the other end are served meanwhile."""
        self._write(["ask", self.encode(request)])
        while True:
            kind, content = json.loads(self._stream.readline() or '["gone", null]')
            if kind == "answer":
                return self.decode(content)
            if kind == "raised":
                error = self._exception_of(content["paths"], content["text"])
                vars(error).update(self.decode(content["fields"]))
                raise error
            if kind != "ask":
                raise EOFError("the code has ended its process")
            self._serve(content)

    def _exception_of(self, paths: "list[str]", text: str) -> BaseException:
        """An exception of the first class of these that this process has."""
        for path in paths:
            module, _, name = path.rpartition(".")
            # Imported by the statements themselves, never because the code says so.
            kind = self.exceptions.get(name) or getattr(sys.modules.get(module or "builtins"), name, None)
            if isinstance(kind, type) and issubclass(kind, (Exception, SystemExit)):
                try:
                    return kind(text)
                except TypeError:  # such as JSONDecodeError, which takes more
                    error = kind.__new__(kind)
                    error.args = (text,)
                    return error
        return RuntimeError(text)

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
            return self._encode_dict(value)
        fields = getattr(type(value), "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            inner = [self.encode(each) for each in tuple.__iter__(value)]
            return ["namedtuple", [type(value).__name__, ["list", list(fields)], ["list", inner]]]
        kinds: tuple[Any, ...] = (list, tuple, set, frozenset, bytes, bytearray)
        for kind in kinds:
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(inner) for inner in kind.__iter__(value)]]
        if isinstance(value, collections.deque):
            inner = [self.encode(each) for each in collections.deque.__iter__(value)]
            return ["deque", [["list", inner], self.encode(value.maxlen)]]
        if isinstance(value, range | slice):
            bounds = [self.encode(bound) for bound in (value.start, value.stop, value.step)]
            return [type(value).__name__, bounds]
        if isinstance(value, Decimal | Fraction):
            return (
                [type(value).__name__, [str(value)]]
                if type(value) in (Decimal, Fraction)
                else self._hold(value)
            )
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if type(value) in (datetime.date, datetime.datetime, datetime.time):
            return [type(value).__name__, [value.isoformat()]]
        if type(value) is datetime.timedelta:
            return [
                "timedelta",
                [["int", [hex(number)]] for number in (value.days, value.seconds, value.microseconds)],
            ]
        if type(value).__module__ == "numpy" and "numpy" in sys.modules:
            return self._encode_numpy(value)
        if isinstance(value, float | str):
            return float(value) if isinstance(value, float) else str.__str__(value)
        if isinstance(value, int) or (hasattr(value, "__index__") and not isinstance(value, type)):
            return ["int", [hex(value)]]
        return self._hold(value)

    def _hold(self, value: Any) -> Any:
        # Held for ever, so that its id stays its own; one number, so that `is` holds at the other end.
        number = self._numbers.setdefault(id(value), len(self._held))
        if number == len(self._held):
            self._held.append(value)
        return ["mine", number]

    def _encode_dict(self, value: "dict[Any, Any]") -> Any:
        # By the plain type's own methods, here and elsewhere: a subclass of the code may override them.
        pairs = [[self.encode(key), self.encode(inner)] for key, inner in dict.items(value)]
        if isinstance(value, collections.defaultdict):
            factory = getattr(value.default_factory, "__name__", None)
            return ["defaultdict", [factory if factory in FACTORIES else None, ["dict", pairs]]]
        kinds = (collections.Counter, collections.OrderedDict)
        return [next((kind.__name__ for kind in kinds if isinstance(value, kind)), "dict"), pairs]

    def _encode_numpy(self, value: Any) -> Any:
        """A number or an array, copied with its type; other objects of numpy stay."""
        numpy = sys.modules["numpy"]
        if not isinstance(value, numpy.ndarray | numpy.generic):
            return self._hold(value)
        if DTYPE.fullmatch(value.dtype.str) is None:
            return self.encode(value.tolist())
        if isinstance(value, numpy.generic):
            return ["number", [value.dtype.str, self.encode(value.item())]]
        return ["array", [value.dtype.str, self.encode(value.shape), self.encode(value.tolist())]]

    def decode(self, value: Any) -> Any:
        """The value, or a proxy of an object that the other end holds."""
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "mine":
            return self._proxies.setdefault(int(content), Proxy(self, int(content)))
        if kind == "yours":
            return self._held[int(content)]
        if kind in PAIRS:
            return COPIED[kind]([(self.decode(key), self.decode(inner)) for key, inner in content])
        return COPIED[kind]([self.decode(inner) for inner in content])

    def _serve(self, content: Any) -> None:
        try:
            answer = ["answer", self.encode(self._done(*self.decode(content)))]
        except (Exception, SystemExit) as error:
            fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
            paths = [_path_of(each) for each in type(error).__mro__]
            answer = ["raised", {"paths": paths, "text": str(error), "fields": self.encode(fields)}]
        self._write(answer)

    def _done(self, action: str, number: int, *operands: Any) -> Any:
        held = self._held[number]
        if action == "call":
            args, named = operands
            result = held(*args, **named)
            return result, [arg if isinstance(arg, CHANGING) else None for arg in args]
        if action == "bool":
            return bool(held)
        if action == "instance":
            return isinstance(operands[0], held)
        if action == "subclass":
            return issubclass(operands[0], held)
        name, *values = operands
        if action == "operator":
            if name not in SPECIAL:
                raise AttributeError(name)
            special = getattr(type(held), name, None)
            return NotImplemented if special is None else special(held, *values[0])
        if self._is_guarded and name.startswith(INNER):
            raise AttributeError(name)
        return getattr(held, name) if action == "get" else setattr(held, name, values[0])

    def _write(self, tree: Any) -> None:
        self._stream.write(json.dumps(tree).encode() + b"\n")
        self._stream.flush()


def _path_of(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


class Solution:
    """The code and its globals, in the code's process."""

    def __init__(self, peer: Peer) -> None:
        module = ModuleType("__solution__")
        sys.modules[module.__name__] = module  # dataclasses and pickle look up a class's module
        self._scope = vars(module)
        peer.encode(self)  # number 0

    def run(self, code: str, imports: str) -> "list[tuple[str, str, Any]]":
        """Run the code. Returns (name, kind, value) of each global; `_scope_of` rebuilds them."""
        exec(compile(imports, "<imports>", "exec", dont_inherit=True), self._scope)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), self._scope)
        return [(name, *_described(value)) for name, value in self._scope.items() if name[:2] != "__"]


def _described(value: Any) -> "tuple[str, Any]":
    if isinstance(value, ModuleType):
        return "module", value.__name__
    if isinstance(value, type) and issubclass(value, Exception):
        return "exception", [each.__name__ for each in value.__mro__]
    return "value", value


def _names_of(described: "list[tuple[str, str, Any]]", peer: Peer) -> "dict[str, Any]":
    """The code's globals, as this process has them: modules and exceptions of its own, copies, proxies."""
    names: dict[str, Any] = {}
    for name, kind, value in described:
        if kind == "module":
            try:
                names[name] = importlib.import_module(value)
            except ImportError:  # one that the code has made
                continue
        elif kind == "exception":
            kinds = (peer.exceptions.get(each) or getattr(builtins, each, None) for each in value)
            base = next(each for each in kinds if isinstance(each, type) and issubclass(each, Exception))
            names[name] = base if value[0] == base.__name__ else type(value[0], (base,), {})
            peer.exceptions[value[0]] = names[name]
        else:
            names[name] = value
    return names


def _provide_code(names: "dict[str, Any]", scope: "dict[str, Any]", code_names: "set[str]") -> None:
    """Let the statements use the code: by its names, and as the modules `solution`, ... that they import.

    A name that the statements have without the code, a built-in or an import, is the code's only where it is
    one of `code_names`: the code must not replace what it is tested with.
    """
    public = {
        name: value
        for name, value in names.items()
        if name in code_names or not (hasattr(builtins, name) or name in scope)
    }
    scope.update(public)
    for name in code_names - names.keys():
        if hasattr(builtins, name):
            raise NameError(f"the code defines no {name}")
    for name in CODE_MODULES:
        module = ModuleType(name)
        vars(module).update(names, __all__=list(public))
        sys.modules[name] = module


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
    described = run(asked["code"], asked["imports"])
    # Test functions are run one by one, and not by what stands behind `if __name__ == "__main__"`.
    scope: dict[str, Any] = {"__name__": "__test__" if asked["case"] else "__main__"}
    exec(compile(asked["setup"], "<setup>", "exec", dont_inherit=True), scope)
    _provide_code(_names_of(described, peer), scope, set(asked["code_names"]))
    pytest = ModuleType("pytest")
    if "pytest" in asked["test"] or asked["case"]:
        exec(compile(asked["pytest"], "pytest", "exec", dont_inherit=True), vars(pytest))
        sys.modules["pytest"] = pytest
        importlib.import_module("unittest").main = lambda *args, **named: None  # type: ignore[attr-defined]
    exec(compile(asked["test"], "test.py", "exec", dont_inherit=True), scope)
    if asked["case"]:
        vars(pytest)["run_case"](scope, asked["case"])
    os.kill(child, 9)  # it must not write anything after the proof
    os.waitpid(child, 0)
    sys.stdout.write("\n" + asked["proof"])


if __name__ == "__main__":
    main()
