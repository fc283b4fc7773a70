"""What a jail's interpreter does first: it sets limits, gives up root, and becomes the program.

Standard library only: the jail passes this file as text (`python -c`), with a descriptor of the order. The
order is emptied when all is in place; where it is not, no line of the program has run. The program's
globals hold no import of this file, and little is imported: it is run for each test.
"""


def _program() -> "object":
    import json
    import os
    import resource
    import sys

    descriptor = int(sys.argv.pop())
    with open(descriptor, "rb", closefd=False) as file:
        order = json.load(file)
    if order["uid"]:
        # Groups before the user: who is not root any more may change neither.
        os.setgroups([])
        os.setgid(order["uid"])
        os.setuid(order["uid"])
    # Limits on processes count those of a user: behind `setuid`, they are this program's alone.
    for name, limit in order["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limit)
    # Only now: an order that is empty says that all limits are in place.
    os.ftruncate(descriptor, 0)
    os.closerange(3, 1 << 16)
    sys.path += order["path"]
    return compile(order["source"], "<string>", "exec", dont_inherit=True)


if __name__ == "__main__":
    exec(_program())  # type: ignore[arg-type]
