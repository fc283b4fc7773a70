"""A warm interpreter in a jail, the template: it forks for each program, and the fork becomes the program.

Standard library only: `warm.py` passes this file as text (`python -c`), with the descriptors of its setup
and of the socket for its requests. A request is a line of JSON with five descriptors: a socket for the
answer, the order (`launcher.py`), and the program's standard input, output and error.

    template ── unshare(pid), fork ── init ── own /tmp, filter of system calls, fork ── program
                                       │                                                   │
    answers with init's exit code <────┴── ends as soon as the program ends <──────────────┘

Each program has namespaces of processes and of mounts of its own. Init is the first process of the former: as
it ends, the kernel kills all others in it, and it is reaped after the last of them. So when the template
answers, no process of the program is left, and none that holds its mounts and its files. The template runs
one program at a time, and no line of a program: it reads neither orders nor outputs. The program has no
descriptor of it, and cannot name it: it sees no processes but those of its own namespace.

Only the template and init have CAP_SYS_ADMIN, with which they make namespaces and mounts; init gives it up,
and installs the filter, before it forks. It stays in the bounding set, from which nothing can be had: no
program can gain privileges (PR_SET_NO_NEW_PRIVS). All of that fails loudly, and then no line of the program
runs.
"""

CLONE_NEWPID = 0x20000000
CLONE_NEWNS = 0x00020000
LINUX_CAPABILITY_VERSION_3 = 0x20080522


def _serve() -> "object":
    """Run programs until the worker ends or enough have run. Returns only in the process of a program, which
    it becomes by what is returned: its code."""
    import contextlib
    import ctypes
    import gc
    import importlib
    import json
    import marshal
    import os
    import resource
    import select
    import signal
    import socket
    import sys
    import types

    control = socket.socket(fileno=int(sys.argv.pop()))
    with open(int(sys.argv.pop()), "rb") as file:
        setup = json.load(file)
    for name in setup["modules"]:
        importlib.import_module(name)
    launcher: dict[str, object] = {"__name__": "launcher"}
    exec(compile(setup["launcher"], "<launcher>", "exec", dont_inherit=True), launcher)
    compiled = {source: marshal.loads(bytes.fromhex(code)) for source, code in setup["compiled"].items()}
    libc = ctypes.CDLL(None, use_errno=True)
    calls = bytes.fromhex(setup["filter"])
    buffer = ctypes.create_string_buffer(calls, len(calls))

    class Filter(ctypes.Structure):
        _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    # Of 8 bytes each, as the kernel's `sock_filter` is.
    installed = Filter(len(calls) // 8, ctypes.addressof(buffer))

    def call_kernel(name: str, *arguments: object) -> None:
        """Make a system call. Raises OSError: it failed."""
        if getattr(libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    def make_init(uid: int, file_bytes: int) -> None:
        """Give this process and its children a /tmp of their own, and take from them what a program must not
        have."""
        call_kernel("unshare", CLONE_NEWNS)
        call_kernel("mount", None, b"/", None, 1 << 14 | 1 << 18, None)  # MS_REC | MS_PRIVATE
        # MS_NOSUID | MS_NODEV, as bubblewrap mounts it.
        call_kernel("mount", b"tmpfs", b"/tmp", b"tmpfs", 2 | 4, f"mode=1777,size={file_bytes}".encode())
        os.chdir("/tmp")
        # CAP_SETGID and CAP_SETUID, with which the launcher gives up root.
        kept = 1 << 6 | 1 << 7 if uid else 0
        header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
        call_kernel("capset", header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0))
        # PR_GET_NO_NEW_PRIVS, which bubblewrap has set: without it the filter would need a capability.
        if libc.prctl(39, 0, 0, 0, 0) != 1:
            raise OSError("a program could gain privileges")
        call_kernel("prctl", 22, 2, ctypes.byref(installed), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

    # Init must have no handler: the kernel spares it only the signals of its namespace that have none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    own_pidfd = os.pidfd_open(os.getpid())
    gc.collect()
    gc.freeze()  # collections in forks would copy all of it
    used_at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(setup["max_programs"]):
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 12, 5)
        if len(descriptors) != 5:
            os._exit(0)  # the worker has ended
        request = json.loads(message)
        answer = descriptors[0]
        order = descriptors[1]
        streams = descriptors[2:]
        call_kernel("unshare", CLONE_NEWPID)
        init = os.fork()
        if init == 0:
            # A session of its own: signals to the program's process group must not reach the template.
            os.setsid()
            # The streams first: 3 may be one of them, or the socket of requests. That is let go of without
            # being closed, because its number may be the order's by then.
            for stream, descriptor in enumerate(streams):
                os.dup2(descriptor, stream)
            os.dup2(order, 3)
            control.detach()
            os.closerange(4, 1 << 16)
            make_init(request["uid"], request["file_bytes"])
            program = os.fork()
            if program == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # A module of its own: what the program leaves in it is freed at its end.
                main = types.ModuleType("__main__")
                started = vars(sys.modules["__main__"]).items()
                vars(main).update((name, value) for name, value in started if name.startswith("__"))
                sys.modules["__main__"] = main
                return launcher["_program"](3, vars(main), compiled)  # type: ignore[operator]
            while True:
                ended, status = os.wait()
                if ended == program:
                    # 128 + signal, as in a shell.
                    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        # After the fork, whose child alone is to be in the new namespace: what is forked next would be of it,
        # too, and could not be once its init has ended.
        call_kernel("setns", own_pidfd, CLONE_NEWPID)
        init_pidfd = os.pidfd_open(init)
        answers = socket.socket(fileno=answer)
        for descriptor in (order, *streams):
            os.close(descriptor)
        events = select.poll()
        events.register(init_pidfd, select.POLLIN)
        events.register(answers, select.POLLIN)
        try:
            socket.send_fds(answers, [b"started"], [init_pidfd])
        except OSError:  # whoever asked has ended
            os.kill(init, signal.SIGKILL)
            events.unregister(answers)
        while init_pidfd not in [descriptor for descriptor, _ in events.poll()]:
            os.kill(init, signal.SIGKILL)  # whoever asked has ended
            events.unregister(answers)  # a closed socket stays readable: the loop would spin
        # Only now is the number of init free for another process: until here, it could be killed by it.
        _, status = os.waitpid(init, 0)
        os.close(init_pidfd)
        has_grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 2 * used_at_start
        is_last = has_grown or number + 1 == setup["max_programs"]
        result = {"code": os.waitstatus_to_exitcode(status), "is_last": is_last}
        with contextlib.suppress(OSError):  # whoever asked has ended
            answers.send(json.dumps(result).encode())
        answers.close()
        if is_last:
            break
    os._exit(0)


def _run(code: "object") -> None:
    """Run a program in the module `__main__`, and end as the interpreter does: show an uncaught exception,
    wait for threads, call the functions of `atexit`, flush files, call destructors.

    What the template had is not freed, unlike there: that would copy all of its memory.
    """
    import atexit
    import gc
    import os
    import signal
    import sys

    # Before the program runs, which may change modules, as any program may.
    end = os._exit
    kill = os.kill
    collect = gc.collect
    number = 0
    error = None
    main = sys.modules["__main__"]
    try:
        exec(code, vars(main))  # type: ignore[arg-type]
    except SystemExit as leave:
        number = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if number and not isinstance(leave.code, int):
            sys.stderr.write(f"{leave.code}\n")
    except BaseException as raised:
        number = 1
        error = type(raised)
        sys.excepthook(error, raised, raised.__traceback__)
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    # In this order: streams that a program has made may need its globals for what they still hold, and so may
    # destructors, which the collection calls.
    has_lost = not _flush()
    sys.stdin = sys.__stdin__
    sys.stdout = sys.__stdout__
    sys.stderr = sys.__stderr__
    sys.modules.pop("__main__", None)
    del main, code
    collect()
    if not _flush() or has_lost:
        number = 120
    if error is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        kill(os.getpid(), signal.SIGINT)
    end(number & 0xFF)


def _flush() -> "bool":
    """Write what standard output and error hold; whether that went well."""
    import sys

    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            # As in the interpreter, what is lost of errors is no error.
            is_flushed = is_flushed and stream is sys.stderr
    return is_flushed


if __name__ == "__main__":
    _run(_serve())
