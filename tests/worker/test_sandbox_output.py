# ruff: noqa: E501 - programs stay on one line
"""Streams: whatever is written, nothing blocks, what was written is kept."""

import pytest
from sandbox_harness import Lab


async def test_megabyte_within_the_limit_is_whole(lab: Lab) -> None:
    result = await lab.run("import sys; sys.stdout.write('x' * (1 << 20))")
    assert (len(result.stdout), result.truncated, result.status) == (1 << 20, False, "ok")


async def test_more_than_the_limit_keeps_head_and_tail_and_marks_the_cut(lab: Lab) -> None:
    result = await lab.run("print('HEAD' + 'x' * 5000 + 'TAIL', end='')", output_kb=1)
    assert (result.status, result.truncated) == ("ok", True)
    assert result.stdout.startswith("HEADx") and result.stdout.endswith("xTAIL")
    assert "[... 3984 bytes cut ...]" in result.stdout


async def test_cut_through_a_character_is_still_text(lab: Lab) -> None:
    result = await lab.run("print('é' * 2000, end='')", output_kb=1)
    assert result.truncated and result.stdout.startswith("é") and result.stdout.endswith("é")


async def test_each_stream_has_a_limit_of_its_own(lab: Lab) -> None:
    code = "import sys\nsys.stdout.write('o' * (2 << 20))\nsys.stderr.write('e' * (2 << 20))\n"
    result = await lab.run(code)
    assert result.status == "ok" and result.truncated
    assert {len(text) >> 20 for text in (result.stdout, result.stderr)} == {1}


async def test_streams_written_in_turns_never_deadlock(lab: Lab) -> None:
    code = """
        import os
        for _ in range(2000):
            os.write(1, b"o" * 200)
            os.write(2, b"e" * 200)
    """
    result = await lab.run(code)
    assert (len(result.stdout), len(result.stderr), result.status) == (400_000, 400_000, "ok")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"no newline", "no newline"),
        (b"a\0b", "a\0b"),
        (b"\xff\xfe ok", "\ufffd\ufffd ok"),
        (b"\x1b[31mred", "\x1b[31mred"),
        (b"\r\n\r", "\r\n\r"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"", ""),
    ],
)
async def test_bytes_arrive_as_they_are_or_replaced(lab: Lab, written: bytes, text: str) -> None:
    assert (await lab.run(f"import os; os.write(1, {written!r})")).stdout == text


async def test_lone_surrogates_can_be_printed(lab: Lab) -> None:
    result = await lab.run("print('\\udcff')")
    assert (result.status, result.stdout) == ("ok", "\ufffd\n")


async def test_daemon_that_holds_stdout_does_not_hold_the_result(lab: Lab) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        print("main")
    """
    result = await lab.run(code, wall_s=40)
    assert (result.status, result.stdout) == ("ok", "main\n")
    assert result.usage.wall_s < 30
    assert lab.sandboxed_pids == []


async def test_what_a_child_prints_after_the_end_is_absent(lab: Lab) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(.5); print('late')\nelse: print('main')"
    assert (await lab.run(code)).stdout == "main\n"


@pytest.mark.parametrize(
    "hang",
    [
        "while True: pass",
        "10 ** 10 ** 8",
        "import time; time.sleep(60)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
        "import atexit, time; atexit.register(time.sleep, 60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import os; os.fork() or os.execvp('sleep', ['sleep', '60']); os.wait()",
        "import signal\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ],
    ids=["loop", "one_c_call", "sleep", "stopped", "regex", "atexit", "thread", "exec", "signals_ignored"],
)
async def test_prints_before_a_timeout_are_kept_without_flush(lab: Lab, hang: str) -> None:
    result = await lab.run(f"import sys\nprint('before', end='')\nprint('err', file=sys.stderr, end='')\n{hang}", wall_s=0.5)
    assert (result.status, result.stdout, result.stderr) == ("timeout", "before", "err")
    assert result.usage.wall_s < 30


async def test_prints_before_memory_limit_are_kept(lab: Lab) -> None:
    result = await lab.run("print('before')\nx = bytearray(200 << 20)", memory_mb=64)
    assert (result.status, result.stdout) == ("memory_limit", "before\n")


async def test_prints_before_a_crash_are_kept(lab: Lab) -> None:
    result = await lab.run("print('before', end='')\nimport os; os.abort()")
    assert (result.status, result.stdout) == ("signal", "before")


async def test_closed_streams_end_the_program_normally(lab: Lab) -> None:
    result = await lab.run("import os\nprint('seen')\nfor fd in (0, 1, 2): os.close(fd)")
    assert (result.status, result.stdout) == ("ok", "seen\n")


async def test_print_to_closed_stdout_is_the_programs_error(lab: Lab) -> None:
    result = await lab.run("import os\nos.close(1)\nprint('x')")
    assert result.status == "error" and "Bad file descriptor" in result.stderr


async def test_only_three_descriptors_exist(lab: Lab) -> None:
    code = """
        import os, stat
        found = []
        for fd in range(4096):
            try:
                os.fstat(fd); found.append(fd)
            except OSError: pass
        print(found)
        for fd in range(3, 4096):
            try:
                os.write(fd, b"forged"); print("wrote", fd)
            except OSError: pass
    """
    assert await lab.output(code) == "[0, 1, 2]\n"


async def test_output_of_subprocesses_keeps_its_order(lab: Lab) -> None:
    code = "import subprocess\nfor i in range(3):\n    print('py', i)\n    subprocess.run(['echo', f'sh {i}'])"
    assert await lab.output(code) == "py 0\nsh 0\npy 1\nsh 1\npy 2\nsh 2\n"


async def test_truncated_or_rewound_stdout_harms_nobody(lab: Lab) -> None:
    code = """
        import os, fcntl
        print("a" * 100)
        os.ftruncate(1, 10)
        fcntl.fcntl(1, fcntl.F_SETFL, 0)
        os.lseek(1, 0, 0)
        os.write(1, b"B")
        try:
            os.ftruncate(1, 1 << 40)
        except OSError as error:
            print(error.errno)
    """
    result = await lab.run(code)
    assert result.status == "ok" and result.stdout.startswith("B")


async def test_sparse_stdout_of_a_terabyte_is_refused(lab: Lab) -> None:
    result = await lab.run("import os; os.ftruncate(1, 1 << 40)")
    assert result.status == "error" and "File too large" in result.stderr


async def test_stdin_cannot_be_written(lab: Lab) -> None:
    code = """
        import os
        for how in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 0), lambda: os.open("/proc/self/fd/0", os.O_RDWR | os.O_TRUNC)):
            try:
                print("did", how())
            except OSError as error:
                print("refused")
        print(os.pread(0, 10, 0))
    """
    assert (await lab.output(code, stdin="data")).endswith("b'data'\n")


async def test_a_million_small_writes_are_fine(lab: Lab) -> None:
    result = await lab.run("import os\nfor _ in range(200_000): os.write(1, b'x')", wall_s=20, cpu_s=20)
    assert (result.status, len(result.stdout)) == ("ok", 200_000)


@pytest.mark.parametrize("stream", [1, 2])
async def test_endless_output_of_one_c_call_at_a_time_is_stopped(lab: Lab, stream: int) -> None:
    result = await lab.run(f"import os\nb = b'x' * (1 << 20)\nwhile True: os.write({stream}, b)", output_kb=64)
    assert result.status == "output_limit"
    assert result.truncated


async def test_result_keeps_both_streams_of_a_failed_program(lab: Lab) -> None:
    result = await lab.run("print('out')\nraise ValueError('bad')")
    assert result.stdout == "out\n" and result.stderr.endswith("ValueError: bad\n")
