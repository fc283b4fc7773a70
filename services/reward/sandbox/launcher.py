"""First code of a program's process: it sets limits, gives up root, and becomes the program.

Standard library only: `jail.py` passes this file as text (`python -c`), with the descriptor of a file of
instructions, the order. The order is emptied as it is read, and gets a mark when all limits are in place;
until then, no line of the program has run. The program's globals hold no import of this file. Imports are
few: it runs for each test. In a warm jail, `template.py` calls `_program` in a fork of its interpreter.
"""


def _program(descriptor: "int", scope: "dict[str, object]", compiled: "dict[str, object]") -> "object":
    """Read the order, set the limits, and run the imports; returns the program. `compiled` are sources that
    need no compiling."""
    import _sitebuiltins
    import builtins
    import json
    import os
    import resource
    import sys

    with open(descriptor, "rb", closefd=False) as file:
        text = file.read()
    # At once: an order that was used before has no text, and must not keep its mark.
    os.ftruncate(descriptor, 0)
    order = json.loads(text)
    if order["uid"]:
        # Groups before the user: a process that is no longer root may change neither.
        os.setgroups([])
        os.setgid(order["uid"])
        os.setuid(order["uid"])
    # After `setuid`: RLIMIT_NPROC counts all processes of the user, which are then this program's alone.
    for name, limit in order["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, highest = resource.getrlimit(number)
        if name == "STACK" and highest != resource.RLIM_INFINITY:
            # The only limit that is raised, which one who is not root may do up to this.
            limit = [min(size, highest) for size in limit]
        resource.setrlimit(number, limit)
    # Last: the mark says that all limits are in place.
    os.pwrite(descriptor, order["mark"].encode(), 0)
    os.closerange(3, 1 << 16)
    sys.path += order["path"]
    sys.setrecursionlimit(order["recursion_limit"])
    sys.set_int_max_str_digits(order["int_digits"])
    for name in ("exit", "quit"):  # of the module `site`, which is not loaded here
        setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
    exec(compile(order["before"], "<imports>", "exec", dont_inherit=True), scope)
    code = compiled.get(order["source"])
    return code or compile(order["source"], "<string>", "exec", dont_inherit=True)


if __name__ == "__main__":
    exec(_program(int(__import__("sys").argv.pop()), globals(), {}))  # type: ignore[arg-type]
