"""What a jail's interpreter does first: it takes limits, another user and the filter of system calls upon
itself, and becomes the program. Nothing takes these off again.

Standard library only: the jail passes this file as text (`python -c`), with a descriptor of the order. The
order is emptied when all is in place; where it is not, no line of the program has run. The program's
globals hold no import of this file, and little is imported: it is run for each test.
"""


def _prepared() -> "tuple[str, list[str]]":
    import ctypes
    import json
    import os
    import resource
    import sys

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    def control(*arguments: int) -> None:
        if libc.prctl(*map(ctypes.c_ulong, arguments), *[ctypes.c_ulong(0)] * (5 - len(arguments))) != 0:
            raise OSError(ctypes.get_errno(), "prctl")

    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal, set_no_new_privileges, set_filter, filter_mode, kill = 1, 38, 22, 2, 9
    descriptor = int(sys.argv.pop())
    with open(descriptor, "rb", closefd=False) as file:
        order = json.load(file)
    for name, limit in order["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    if order["uid"]:
        os.setgroups([])
        os.setgid(order["uid"])
        os.setuid(order["uid"])
    control(set_parent_death_signal, kill)  # behind setuid, which takes it off
    control(set_no_new_privileges, 1)
    code = bytes.fromhex(order["filter"])
    filled = Filter(len(code) // 8, code)
    control(set_filter, filter_mode, ctypes.addressof(filled))
    os.ftruncate(descriptor, 0)
    os.closerange(3, 1 << 16)
    return order["source"], order["path"]


def _program() -> "object":
    import sys

    source, path = _prepared()
    sys.path += path
    return compile(source, "<string>", "exec", dont_inherit=True)


if __name__ == "__main__":
    exec(_program())  # type: ignore[arg-type]
