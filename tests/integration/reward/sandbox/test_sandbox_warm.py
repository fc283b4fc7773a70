"""Jails that are ready: what programs leave behind is gone before the next one starts, none reaches the
interpreter that it was forked from, and one that fails is replaced."""

import contextlib
import errno
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox import bubblewrap, jail
from tidemill.services.reward.sandbox import warm as warm_module
from tidemill.services.reward.sandbox.job import make_cases, make_warm_jails, run_cases, run_tests
from tidemill.services.reward.sandbox.preamble import write_imports
from tidemill.services.reward.sandbox.warm import WarmJails, WarmProgram

LIMITS = SandboxConfig(time_s=20.0, total_s=60.0, memory_mb=256, file_mb=4)
HASTY = LIMITS.model_copy(update={"time_s": 1.5})


def ran(code: str, config: SandboxConfig = LIMITS) -> dict[str, Any]:
    (result,) = run_cases(make_cases(code, {"inputs": [""], "outputs": ["any"]}, 1), config)
    return result


def template_pid(warm: WarmJails) -> int:
    """The process id of bubblewrap, with which a warm jail ends."""
    (template,) = warm._templates.values()
    return template._process.pid


SNAPSHOT = """
import gc, json, os, resource, signal, sys, time
def open_files():
    for number in range(64):
        try:
            os.fstat(number)
            yield number
        except OSError:
            pass
names = [name for name in dir(resource) if name[:7] == "RLIMIT_"]
limits = {name: resource.getrlimit(getattr(resource, name)) for name in names}
signals = {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()}
print(json.dumps({
    "files": os.listdir("/tmp"), "folder": os.getcwd(), "environment": dict(os.environ), "limits": limits,
    "descriptors": list(open_files()), "signals": signals, "umask": os.umask(0o22),
    "mask": sorted(map(int, signal.pthread_sigmask(0, []))), "pids": [os.getpid(), os.getppid()],
    "timer": signal.getitimer(signal.ITIMER_REAL),
    "cpus": sorted(os.sched_getaffinity(0)), "recursion": sys.getrecursionlimit(), "argv": sys.argv,
    "path": sys.path, "names": sorted(globals()), "stdin": sys.stdin.read(), "module": __name__,
    "is_root": 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()),
    "threshold": gc.get_threshold(), "enabled": gc.isenabled(),
}, default=str, sort_keys=True))
"""


def test_a_program_in_a_warm_jail_begins_as_in_one_of_its_own(isolated: None, warm: WarmJails) -> None:
    in_warm = ran(SNAPSHOT)
    imports = write_imports(SNAPSHOT)
    alone = jail.run_program(SNAPSHOT, "", LIMITS, 20.0, imports, has_file=True)
    assert in_warm["outcome"] == alone["outcome"] == "done", (in_warm, alone)
    expected = json.loads(alone["stdout"])
    if not bubblewrap.is_admin():  # the limit counts the two processes of the warm jail, too
        expected["limits"]["RLIMIT_NPROC"] = [18, 18]
    expected["names"] = [name for name in expected["names"] if name != "_program"]
    assert json.loads(in_warm["stdout"]) == expected


LEFT = """
import atexit, ctypes, gc, os, resource, signal, sys, time, builtins, json, random
open("/tmp/left", "w").write("x")
os.mkdir("/tmp/folder")
os.environ["LEFT"] = "x"
os.chdir("/tmp/folder")
os.umask(0)
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.setitimer(signal.ITIMER_REAL, 1000)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.setrecursionlimit(99)
sys.path.append("/tmp")
gc.disable()
builtins.print = json.dumps = os.getpid = None
json.left = True
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
"""


def test_nothing_of_a_program_is_left_for_the_next_one(warm: WarmJails) -> None:
    before = ran(SNAPSHOT)
    result = ran(LEFT)
    assert (result["outcome"], result["code"]) == ("done", 0), result
    after = ran(SNAPSHOT + "import json; assert not hasattr(json, 'left')")
    assert (after["outcome"], after["code"]) == ("done", 0), after
    assert json.loads(after["stdout"]) == json.loads(before["stdout"])


DAEMON = """
import os, sys, time
for _ in range(3):
    r, w = os.pipe()
    os.set_inheritable(w, True)
    if os.fork() == 0:
        if os.fork() == 0:
            code = f"import os, time; os.write({{w}}, bytes(1)); time.sleep(600)"
            os.execv(sys.executable, [{mark!r}, "-I", "-S", "-c", code])
        os._exit(0)
    os.read(r, 1)
print("ok")
"""


def with_mark(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline():
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def test_daemons_of_a_program_are_dead_before_its_result_is_there(warm: WarmJails) -> None:
    mark = f"tidemill-daemon-{os.getpid()}"
    assert ran(DAEMON.format(mark=mark))["stdout"] == "ok\n"
    assert not with_mark(mark)
    assert ran("import os\nprint(os.getpid())")["stdout"] == "2\n"  # the first after its init


@pytest.mark.parametrize("attack", [
    "os.kill(os.getppid(), signal.SIGKILL)", "os.kill(1, signal.SIGINT)", "os.kill(1, signal.SIGSTOP)",
    "os.kill(-1, signal.SIGKILL)", "os.kill(0, signal.SIGTERM)", "os.killpg(0, signal.SIGKILL)",
    "signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGKILL)",
    "os.sched_setaffinity(1, {0}); os.kill(0, 0)",
    "[os.kill(pid, signal.SIGKILL) for pid in range(3, 400)]",
])  # fmt: skip
def test_no_signal_of_a_program_reaches_its_template(warm: WarmJails, attack: str) -> None:
    assert ran("print('first')")["stdout"] == "first\n"
    template = template_pid(warm)
    result = ran(f"import os, signal\ntry:\n    {attack}\nexcept OSError: pass\nprint('through')")
    assert result["stdout"] in ("through\n", ""), result
    assert ran("print('next')")["stdout"] == "next\n"
    assert template_pid(warm) == template


REPLACED = """
import gc, json, os, socket, sys
sent = 0
for number in range(3, 1 << 16):
    try:
        os.write(number, json.dumps({"code": 0, "is_last": False}).encode())
        sent += 1
    except OSError:
        pass
sockets = [held for held in gc.get_objects() if isinstance(held, socket.socket)]
print(sent, sum(held.fileno() >= 0 for held in sockets))
sys.exit(3)
"""


def test_a_program_has_no_descriptor_by_which_it_could_answer_for_its_jail(warm: WarmJails) -> None:
    result = ran(REPLACED)
    assert (result["stdout"], result["code"]) == ("0 0\n", 3), result


def test_programs_get_random_numbers_of_their_own(warm: WarmJails) -> None:
    code = "import os, random, uuid\nprint(random.random(), uuid.uuid4(), os.urandom(8).hex())"
    written = {ran(code)["stdout"] for _ in range(4)}
    assert len(written) == 4


def test_a_program_without_an_end_is_killed_and_its_template_goes_on(warm: WarmJails) -> None:
    ran("pass")
    template = template_pid(warm)
    mark = f"tidemill-endless-{os.getpid()}"
    sleep = f"os.execv(sys.executable, [{mark!r}, '-c', 'import time; time.sleep(600)'])"
    loop = f"import os, sys\nif os.fork() == 0: {sleep}\nwhile True: pass"
    assert ran(loop, HASTY)["outcome"] == "timeout"
    assert not with_mark(mark)
    assert ran("print('next')")["stdout"] == "next\n"
    assert template_pid(warm) == template


ENDS: list[tuple[str, str, int]] = [
    ("import atexit\natexit.register(print, 'at exit')", "at exit\n", 0),
    (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()", "thread\n", 0,
    ),
    ("class A:\n    def __del__(self): print('freed')\na = A()", "freed\n", 0),
    ("class A:\n    def __del__(self): print('freed')\na = A(); a.itself = a", "freed\n", 0),
    ("import os\nclass A:\n    def __del__(self): os.write(1, b'freed')\na = A()", "freed", 0),
    ("import os\nclass A:\n    def __del__(self): os.write(1, b'x')\ndef f(): return a\na = A()", "x", 0),
    (
        "import io, os, sys\nclass Out(io.StringIO):\n"
        "    def flush(self): os.write(1, self.getvalue().encode()); self.truncate(0); self.seek(0)\n"
        "sys.stdout = Out()\nprint('mine')", "mine\n", 0,
    ),
    (
        "import io, os\nclass Out(io.IOBase):\n    def flush(self): os.write(1, b'closed')\n"
        "out = Out()", "closed", 0,
    ),
    ("out = open(1, 'w'); out.write('buffered')", "buffered", 0),
    ("import sys\nsys.stdout = open(1, 'w'); print('mine')", "mine\n", 0),
    ("import sys\nsys.exit('words')", "", 1),
    ("import sys\nsys.exit(7)", "", 7),
    ("import sys\nsys.exit(-1)", "", 255),
    ("import sys\nsys.exit(True)", "", 1),
    ("raise SystemExit", "", 0),
    ("print('x'); raise KeyboardInterrupt", "x\n", 130),
    ("print('x'); 1 / 0", "x\n", 1),
    ("print('x'", "", 1),
    ("import sys\nsys.excepthook = lambda *_: print('hook')\n1 / 0", "hook\n", 1),
    ("import os\nprint('lost'); os._exit(5)", "", 5),
    ("import os\nos.abort()", "", 134),
    ("import sys\nprint('x'); sys.stdout.flush(); import os; os.close(1); print('y')", "x\n", 120),
    ("def f(n): return f(n + 1)\nf(0)", "", 1),
    ("import builtins, os\nbuiltins.print = os._exit = None; del builtins.open\nraise SystemExit(4)", "", 4),
]  # fmt: skip


@pytest.mark.parametrize(("code", "stdout", "status"), ENDS)
def test_a_program_ends_as_in_a_jail_of_its_own(each_jail: None, code: str, stdout: str, status: int) -> None:
    result = ran(code)
    assert (result["stdout"], result["code"]) == (stdout, status), result


def test_an_interpreter_serves_a_bounded_number_of_programs(
    warm: WarmJails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_module, "MAX_PROGRAMS", 3)
    seeds = [ran("print(hash('text'))")["stdout"] for _ in range(7)]
    assert [seeds.index(seed) for seed in seeds] == [0, 0, 0, 3, 3, 3, 6]


def test_a_program_whose_template_dies_is_run_again(
    isolated: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is the machine's fault: the program's result is that of its second run."""
    warm, _ = make_warm_jails([LIMITS])
    assert warm is not None
    victim = template_pid(warm)
    wait_for_end = WarmProgram.wait_for_end

    def die(program: WarmProgram, timeout_s: float) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return wait_for_end(program, timeout_s)

    monkeypatch.setattr(WarmProgram, "wait_for_end", die)
    code = "import time\ntime.sleep(1)\nprint('ended')"
    cases = make_cases(code, {"inputs": [""], "outputs": ["ended"]}, 1)
    try:
        (result,) = run_cases(cases, LIMITS, warm)
        assert cases[0].passed(result), result
        assert "a warm jail failed" in capfd.readouterr().err
        (result,) = run_cases(cases, LIMITS, warm)
        assert cases[0].passed(result)
        assert template_pid(warm) != victim
    finally:
        warm.close()


def test_a_template_that_hangs_is_replaced(isolated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "ANSWER_S", 1.0)
    warm, _ = make_warm_jails([LIMITS])
    assert warm is not None
    try:
        victim = psutil.Process(template_pid(warm))
        for process in [victim, *victim.children(recursive=True)]:
            process.suspend()
        result = run_tests("print(input())", {"inputs": ["1"], "outputs": ["1"]}, LIMITS, warm=warm)
        assert result.get("passed") == 1, result
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
    finally:
        warm.close()


async def test_a_program_ends_with_whoever_asked_for_it(isolated: None) -> None:
    """A process of a job may be killed at any time; the jail belongs to its worker, and goes on."""
    mark = f"tidemill-orphan-{os.getpid()}"
    code = f"import os, sys\nos.execv(sys.executable, [{mark!r}, '-c', 'import time; time.sleep(600)'])"
    warm, _ = make_warm_jails([LIMITS])
    assert warm is not None
    try:
        job = os.fork()
        if job == 0:
            run_cases(make_cases(code, {"inputs": [""], "outputs": ["x"]}, 1), LIMITS, warm)
            os._exit(0)
        try:
            await wait_until(lambda: with_mark(mark))
        finally:
            os.kill(job, signal.SIGKILL)
            os.waitpid(job, 0)  # noqa: ASYNC222 (it was killed)
        await wait_until(lambda: not with_mark(mark))
        cases = make_cases("print(1)", {"inputs": [""], "outputs": ["1"]}, 1)
        template = template_pid(warm)
        (result,) = run_cases(cases, LIMITS, warm)
        assert cases[0].passed(result) and template_pid(warm) == template
    finally:
        warm.close()


def test_where_no_template_can_be_had_programs_get_jails_of_their_own(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel, or rules of a machine, may refuse what a template does. It fails before it runs a line."""
    refused = warm_module.TEMPLATE.replace('call_kernel("unshare", CLONE_NEWNS)', 'raise OSError("refused")')
    assert refused != warm_module.TEMPLATE
    monkeypatch.setattr(warm_module, "TEMPLATE", refused)
    warm, sentence = make_warm_jails([LIMITS])
    assert warm is None and "refused" in sentence
    assert run_tests("print(input())", {"inputs": ["1"], "outputs": ["1"]}, LIMITS, warm=warm)["passed"] == 1


def test_a_jail_whose_python_lies_below_tmp_is_not_warm(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python")
    warm_module.can_be_warm.cache_clear()
    try:
        warm, sentence = make_warm_jails([LIMITS])
        assert warm is None and "/tmp" in sentence
    finally:
        monkeypatch.undo()
        warm_module.can_be_warm.cache_clear()


def test_a_program_that_may_have_run_is_run_again_with_files_of_its_own(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template ends after the fork and before it has said so: the program has read its input by then."""
    line = "init_pidfd = os.pidfd_open(init)"
    pause = "select.select([], [], [], 1.0)"
    late = f"if number:\n            {pause}\n            raise OSError('injected')\n        "
    assert warm_module.TEMPLATE.count(line) == 1
    monkeypatch.setattr(warm_module, "TEMPLATE", warm_module.TEMPLATE.replace(line, late + line))
    warm, sentence = make_warm_jails([LIMITS])
    assert warm is not None, sentence
    try:
        result = run_tests("print(input())", {"inputs": ["1"], "outputs": ["1"]}, LIMITS, warm=warm)
        assert result.get("passed") == 1, result
    finally:
        warm.close()


def test_an_order_that_was_used_before_is_not_set_up(isolated: None) -> None:
    with jail._program("print(input())", "1", LIMITS, "") as program:
        assert not program.is_set_up()
        assert jail._run_cold(program, 20.0, has_file=False)["stdout"] == "1\n"
        with pytest.raises(bubblewrap.SandboxError):
            jail._run_cold(program, 20.0, has_file=False)


def test_the_time_that_a_jail_loses_is_not_the_codes(isolated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LIMITS.model_copy(update={"total_s": 3.0})
    monkeypatch.setattr(warm_module, "ANSWER_S", config.total_s)
    warm, _ = make_warm_jails([config])
    assert warm is not None
    try:
        victim = psutil.Process(template_pid(warm))
        for process in [victim, *victim.children(recursive=True)]:
            process.suspend()
        tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
        result = run_tests("print(input())", tests, config, warm=warm)
        assert result.get("outcomes") == ["done"] * 3 and result["passed"] == 3, result
    finally:
        warm.close()


def test_where_the_group_of_a_program_cannot_be_read_it_gets_a_jail_of_its_own(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Linux 5.8 to 5.13 without root: there /proc/self/fdinfo is root's, because `hide_memory` was
    called."""
    read_text = Path.read_text

    def refuse(path: Path, *arguments: Any, **named: Any) -> str:
        if "fdinfo" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", refuse)
    warm, sentence = make_warm_jails([LIMITS])
    assert warm is None and os.strerror(errno.EACCES) in sentence
    warm = WarmJails()
    code = "import time\ntime.sleep(0.5)\nprint(input())"  # it is looked at while it runs
    try:
        result = run_tests(code, {"inputs": ["1"], "outputs": ["1"]}, LIMITS, warm=warm)
        assert result.get("passed") == 1, result
    finally:
        warm.close()


def test_a_template_whose_programs_do_not_run_is_not_used(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All limits are in place there, and the program ends well; what it should have written is not there."""
    line = 'return launcher["_program"](3, vars(main), compiled)  # type: ignore[operator]'
    assert warm_module.TEMPLATE.count(line) == 1
    called = line.removeprefix("return ").partition("  #")[0]
    idle = warm_module.TEMPLATE.replace(line, f"{called}; return 'pass'")
    monkeypatch.setattr(warm_module, "TEMPLATE", idle)
    warm, sentence = make_warm_jails([LIMITS])
    assert warm is None and "cannot run Python" in sentence


def test_a_program_whose_init_is_killed_from_outside_is_run_again(
    isolated: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the kernel for want of memory, or an operator: no program can do so."""
    warm, _ = make_warm_jails([LIMITS])
    assert warm is not None

    def kill_init(init: int, num_others: int, program: Any) -> str:
        if init and num_others == jail.INITS and program.is_set_up():
            os.kill(init, signal.SIGKILL)
        return ""

    monkeypatch.setattr(jail, "_excess", kill_init)
    code = "import time\ntime.sleep(1)\nprint(input())"
    try:
        result = run_tests(code, {"inputs": ["1"], "outputs": ["1"]}, LIMITS, warm=warm)
        assert result.get("passed") == 1, result
        assert "its init was killed" in capfd.readouterr().err
    finally:
        warm.close()


@pytest.mark.skipif(not bubblewrap.is_admin(), reason="a program of the same user may kill it, too")
def test_a_jail_that_is_killed_from_outside_is_no_result(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_bubblewrap(group: int, _: int, program: Any) -> str:
        if program.is_set_up():
            os.kill(group, signal.SIGKILL)
        return ""

    monkeypatch.setattr(jail, "_excess", kill_bubblewrap)
    code = "import time\ntime.sleep(5)\nprint(input())"
    result = run_tests(code, {"inputs": ["1"], "outputs": ["1"]}, LIMITS)
    assert result.get("is_final") is False and "was killed" in result["error"], result


async def test_where_interpreters_fail_in_a_row_a_worker_does_without_for_longer_and_longer(
    isolated: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each failure may cost a job ten seconds. One that has served all of its programs is no failure."""
    monkeypatch.setattr(warm_module, "MAX_PROGRAMS", 1)
    warm = WarmJails()
    pauses = []
    try:
        for _ in range(3):
            warm.prepare([LIMITS])
            os.killpg(template_pid(warm), signal.SIGKILL)
            await wait_until(lambda: not any(each.takes_requests() for each in warm._templates.values()))
            began = time.monotonic()
            warm.prepare([LIMITS])
            assert not warm._templates
            pauses.append(math.floor(warm._paused_until - began))
            warm._paused_until = 0.0
        assert pauses == [1, 2, 4]
        deaths = [line for line in capfd.readouterr().err.splitlines() if "a warm jail died (" in line]
        assert len(deaths) == 3 and deaths[0].endswith("jails of their own for 1 s")
        warm.prepare([LIMITS])
        job = os.fork()
        if job == 0:
            run_cases(make_cases("print(1)", {"inputs": [""], "outputs": ["1"]}, 1), LIMITS, warm)
            os._exit(0)
        os.waitpid(job, 0)  # noqa: ASYNC222 (it ends by itself)
        warm.prepare([LIMITS])
        assert not warm.is_paused and warm._pause_s == 1.0 and warm._templates
    finally:
        warm.close()


def test_warm_jails_that_a_machine_cannot_have_at_a_workers_start_are_tried_again(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as shortage:
        shortage.setattr(warm_module, "Template", refuse)
        warm, sentence = make_warm_jails([LIMITS])
        assert warm is not None and warm.is_paused and "until" in sentence
    try:
        tests = {"inputs": ["1"], "outputs": ["1"]}
        assert run_tests("print(input())", tests, LIMITS, warm=warm)["passed"] == 1
        assert not warm._templates
        warm._paused_until = 0.0
        warm.prepare([LIMITS])
        assert run_tests("print(input())", tests, LIMITS, warm=warm)["passed"] == 1
        assert template_pid(warm)
    finally:
        warm.close()


def test_what_is_around_an_interpreter_that_has_ended_is_killed_where_it_does_not_end() -> None:
    script = "import os, sys, time; os.close(int(sys.argv[-1])); time.sleep(60)"
    template = warm_module.Template([sys.executable, "-I", "-c", script], b"{}")
    template.finish()
    assert template._process.returncode == -signal.SIGKILL
