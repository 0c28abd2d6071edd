# ruff: noqa: E501 - programs stay on one line
"""A program behaves as `python main.py` would."""

import textwrap

import pytest
from sandbox_harness import Lab

PRINTS = {
    "future_annotations": (
        "from __future__ import annotations\ndef f(x: Nope): pass\nprint(f.__annotations__)",
        "{'x': 'Nope'}",
    ),
    "future_after_docstring": ('"""Doc."""\nfrom __future__ import annotations\nprint(__doc__)', "Doc."),
    "main_guard": ("if __name__ == '__main__':\n    print('main')", "main"),
    "file_name": ("print(__file__)\nimport os; print(os.path.exists(__file__))", "/main.py\nTrue"),
    "main_module": ("import sys, __main__\nx = 5\nprint(__main__.x, sys.modules['__main__'].x)", "5 5"),
    "getsource": (
        "import inspect\ndef f():\n    return 1  # one\nprint(inspect.getsource(f))",
        "def f():\n    return 1  # one",
    ),
    "pickle_own_class": (
        "import pickle\nclass P:\n    def __init__(self, x): self.x = x\nprint(pickle.loads(pickle.dumps(P(3))).x)",
        "3",
    ),
    "dataclass_enum_typing": (
        "import dataclasses, enum, typing\n@dataclasses.dataclass\nclass D:\n    x: int = 1\n"
        "class E(enum.Enum):\n    A = 1\nprint(D(), E.A, typing.get_type_hints(D))",
        "D(x=1) E.A {'x': <class 'int'>}",
    ),
    "thread_after_main": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()\nprint('main')",
        "main\nlate",
    ),
    "daemon_thread_is_left": (
        "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()\nprint('main')",
        "main",
    ),
    "held_back": ("import sys\nsys.stdout.reconfigure(write_through=False)\nprint('late')", "late"),
    "atexit_order": ("import atexit\natexit.register(print, 'b')\natexit.register(print, 'a')\nprint('main')", "main\na\nb"),
    "atexit_after_threads": (
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "threading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()",
        "thread\nexit",
    ),
    "executor_left_open": (
        "from concurrent.futures import ThreadPoolExecutor\nimport time\ne = ThreadPoolExecutor(2)\n"
        "e.submit(lambda: (time.sleep(.1), print('done')))",
        "done",
    ),
    "del_at_exit": ("class A:\n    def __del__(self): print('deleted')\na = A()\nprint('main')", "main\ndeleted"),
    "asyncio": ("import asyncio\nasync def f():\n    await asyncio.sleep(.01)\n    return 4\nprint(asyncio.run(f()))", "4"),
    "asyncio_subprocess": (
        "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)\n"
        "    return (await p.communicate())[0]\nprint(asyncio.run(f()))",
        "b'hi\\n'",
    ),
    "sqlite": (
        "import sqlite3\nd = sqlite3.connect('x.db')\nd.execute('create table t(a)')\nd.execute('insert into t values (7)')\n"
        "d.commit()\nprint(d.execute('select * from t').fetchall())",
        "[(7,)]",
    ),
    "tempfile": (
        "import tempfile, os\nwith tempfile.NamedTemporaryFile() as f: print(os.path.dirname(f.name))\nprint(tempfile.gettempdir())",
        "/tmp\n/tmp",
    ),
    "shared_memory": (
        "from multiprocessing.shared_memory import SharedMemory\ns = SharedMemory(create=True, size=10)\ns.buf[0] = 9\n"
        "t = SharedMemory(s.name)\nprint(t.buf[0])\nt.close()\ns.close()\ns.unlink()",
        "9",
    ),
    "ctypes": ("import ctypes\nprint(ctypes.CDLL(None).abs(-3))", "3"),
    "decimal": ("from decimal import *\ngetcontext().prec = 5\nprint(Decimal(1) / 3)", "0.33333"),
    "subprocess_python": (
        "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(1 + 1)'], text=True).strip())",
        "2",
    ),
    "subprocess_imports_packages": (
        "import subprocess, sys\nc = 'import numpy; print(numpy.arange(3).sum())'\n"
        "print(subprocess.check_output([sys.executable, '-c', c], text=True).strip())",
        "3",
    ),
    "shell": ("import subprocess\nprint(subprocess.getoutput('echo $((6*7))'))", "42"),
    "import_own_module": ("open('m.py', 'w').write('x = 8')\nimport m\nprint(m.x, m.__file__)", "8 /tmp/m.py"),
    "working_folder": ("import os\nprint(os.path.samefile('.', '/tmp'), os.listdir('.'))", "True []"),
    "recursion_error": ("def f(): f()\ntry: f()\nexcept RecursionError as e: print(type(e).__name__)", "RecursionError"),
    "numpy": ("import numpy as np\nprint(np.arange(4).reshape(2, 2) @ np.eye(2))", "[[0. 1.]\n [2. 3.]]"),
    "unseen_package": ("import sympy\nprint(sympy.factorint(12))", "{2: 2, 3: 1}"),
    "system_exit_in_thread": (
        "import threading, sys\nt = threading.Thread(target=lambda: sys.exit(5)); t.start(); t.join()\nprint('on')",
        "on",
    ),
    "signal_handler": (
        "import signal, os\nsignal.signal(signal.SIGUSR1, lambda *a: print('got'))\nos.kill(os.getpid(), signal.SIGUSR1)",
        "got",
    ),
    "locale": ("print('é', '日本', '🎉')", "é 日本 🎉"),
    "globals_are_a_scripts": (
        "print(sorted(set(globals()) - {'__annotations__'}))",
        "['__builtins__', '__cached__', '__doc__', '__file__', '__loader__', '__name__', '__package__', '__spec__']",
    ),
}


@pytest.mark.parametrize("name", PRINTS)
async def test_script_prints_what_it_would(lab: Lab, name: str) -> None:
    code, expected = PRINTS[name]
    result = await lab.run(code)
    assert (result.status, result.stdout.rstrip("\n"), result.stderr) == ("ok", expected, "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
async def test_multiprocessing_pool_and_process_work(lab: Lab, method: str) -> None:
    code = f"""
        import multiprocessing as mp
        def square(x): return x * x
        def tell(q): q.put("told")
        if __name__ == "__main__":
            mp.set_start_method("{method}")
            with mp.Pool(2) as pool:
                print(pool.map(square, range(4)))
            q = mp.Queue()
            p = mp.Process(target=tell, args=(q,)); p.start(); print(q.get()); p.join(); print(p.exitcode)
    """
    assert await lab.output(code, wall_s=20) == "[0, 1, 4, 9]\ntold\n0\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(None)", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit(256)", 0, ""),
        ("import sys; sys.exit(True)", 1, ""),
        ("import sys; sys.exit('words')", 1, "words\n"),
        ("raise SystemExit(4)", 4, ""),
        ("exit()", 0, ""),
        ("exit(3)", 3, ""),
        ("quit(2)", 2, ""),
        ("import os; os._exit(9)", 9, ""),
    ],
)
async def test_exit_code_is_a_scripts_and_not_completed(lab: Lab, code: str, exit_code: int, stderr: str) -> None:
    result = await lab.run(code)
    assert (result.exit_code, result.stderr, result.completed) == (exit_code, stderr, False)
    assert result.status == ("ok" if exit_code == 0 else "error")


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout", "stderr"),
    [
        ("raise KeyboardInterrupt", 130, "", "KeyboardInterrupt"),
        ("input()", 1, "", "EOFError"),
        ("import no_such_package", 1, "", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.excepthook = lambda *a: print('hooked')\n1 / 0", 1, "hooked\n", ""),
        ("import sys\nsys.excepthook = None\n1 / 0", 1, "", "ZeroDivisionError"),
    ],
    ids=["keyboard_interrupt", "input_without_stdin", "missing_package", "own_excepthook", "broken_excepthook"],
)
async def test_error_shows_pythons_own_words(lab: Lab, code: str, exit_code: int, stdout: str, stderr: str) -> None:
    result = await lab.run(code)
    assert (result.status, result.exit_code, result.stdout) == ("error", exit_code, stdout)
    assert stderr in result.stderr


async def test_input_reads_lines_of_stdin(lab: Lab) -> None:
    assert await lab.output("print(input('? ') + input(), end='')", stdin="a\nb\n") == "? ab"


@pytest.mark.parametrize(
    "read",
    [
        "sys.stdin.read()",
        "open('/dev/stdin').read()",
        "open(0).read()",
        "''.join(sys.stdin)",
        "sys.stdin.buffer.read().decode()",
    ],
)
async def test_stdin_can_be_read_in_every_way(lab: Lab, read: str) -> None:
    assert await lab.output(f"import sys\nprint({read}, end='')", stdin="é\n2\n") == "é\n2\n"


async def test_large_unread_stdin_blocks_nobody(lab: Lab) -> None:
    assert await lab.output("print('done')", stdin="x" * (8 << 20)) == "done\n"


async def test_argv_and_env_are_the_callers(lab: Lab) -> None:
    code = "import sys, os\nprint(sys.argv, os.environ['A'], os.environ['PATH'])"
    out = await lab.output(code, argv=["-v", "two words"], env={"A": "1 é", "PATH": "/x"})
    assert out == "['/main.py', '-v', 'two words'] 1 é /x\n"


async def test_environment_holds_nothing_of_the_service(lab: Lab) -> None:
    names = set((await lab.output("import os\nprint(*os.environ)")).split())
    subprocess = "import subprocess\nprint(*(l.split('=')[0] for l in subprocess.getoutput('env').splitlines()))"
    names |= set((await lab.output(subprocess)).split())
    expected = """PATH HOME TMPDIR USER LANG PYTHONPATH PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED OMP_NUM_THREADS OPENBLAS_NUM_THREADS
        MKL_NUM_THREADS MPLBACKEND MPLCONFIGDIR PWD SHLVL OLDPWD _""".split()
    assert names <= set(expected)


async def test_environment_of_one_call_is_not_the_next_ones(lab: Lab) -> None:
    await lab.run("import os; os.environ['LEFT'] = '1'", env={"MINE": "1"})
    assert await lab.output("import os\nprint('LEFT' in os.environ, 'MINE' in os.environ)") == "False False\n"


async def test_random_numbers_differ_between_calls(lab: Lab) -> None:
    code = (
        "import random, numpy, sympy, uuid, os\n"
        "print(random.random(), random.gauss(), numpy.random.rand(), uuid.uuid4(), os.urandom(8).hex())\n"
        "print(sympy.randprime(10**9, 10**10), sympy.core.random.rng.random())"
    )
    first, second = await lab.output(code), await lab.output(code)
    assert all(a != b for a, b in zip(first.split(), second.split(), strict=True))


async def test_seeded_random_numbers_are_the_same(lab: Lab) -> None:
    code = "import random, numpy\nrandom.seed(1); numpy.random.seed(1)\nprint(random.random(), numpy.random.rand())"
    assert await lab.output(code) == await lab.output(code)


# -- tracebacks ---------------------------------------------------------------------------------------------------------------


TRACEBACKS = {
    "plain": (
        "x = 1\n\ndef f():\n    return x / 0\n\nf()\n",
        ['File "/main.py", line 6, in <module>', "line 4, in f", "x / 0"],
    ),
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
        ["line 2, in <module>", "direct cause", "line 4, in <module>"],
    ),
    "in_context": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    nope\n",
        ["line 2", "During handling", "line 4", "NameError"],
    ),
    "syntax": ("x = 1\ny = = 2\n", ['File "/main.py", line 2', "y = = 2", "SyntaxError"]),
    "indentation": ("if 1:\nx\n", ['File "/main.py", line 2', "IndentationError"]),
    "null_byte": ("x = '\0'", ["null byte"]),
    "group": ("raise ExceptionGroup('g', [ValueError(1)])", ["ExceptionGroup: g", "ValueError: 1"]),
    "recursion": ("def f():\n    f()\nf()\n", ["line 3, in <module>", "line 2, in f", "RecursionError"]),
    "in_atexit": ("import atexit\n@atexit.register\ndef bye():\n    1 / 0\n", ["line 4, in bye", "ZeroDivisionError"]),
    "in_library": ("import json\njson.loads('{')\n", ["line 2, in <module>", "json/decoder.py", "JSONDecodeError"]),
    "imported_module": ("open('m.py','w').write('1/0')\nimport m", ['File "/tmp/m.py", line 1', 'File "/main.py", line 2']),
}


@pytest.mark.parametrize("name", TRACEBACKS)
async def test_traceback_has_the_programs_lines_and_no_frames_of_ours(lab: Lab, name: str) -> None:
    code, parts = TRACEBACKS[name]
    result = await lab.run(code)
    for part in parts:
        assert part in result.stderr
    assert "/opt/service" not in result.stderr and "zygote" not in result.stderr and "program.py" not in result.stderr
    assert result.exit_code == (0 if name == "in_atexit" else 1)


async def test_exception_in_thread_shows_its_line_and_the_program_goes_on(lab: Lab) -> None:
    code = "import threading\ndef work():\n    1 / 0\nt = threading.Thread(target=work)\nt.start(); t.join()\nprint('on')\n"
    result = await lab.run(code)
    assert (result.status, result.stdout) == ("ok", "on\n")
    assert 'File "/main.py", line 3, in work' in result.stderr and "/opt/service" not in result.stderr


async def test_warning_names_the_programs_line(lab: Lab) -> None:
    result = await lab.run("import warnings\nwarnings.warn('careful')")
    assert "/main.py:2: UserWarning: careful" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import traceback; traceback.print_stack()",
        "import warnings; warnings.warn('x', stacklevel=2)",
        "import inspect, sys; print([f.filename for f in inspect.stack()], file=sys.stderr)",
    ],
    ids=["print_stack", "stacklevel", "inspect_stack"],
)
@pytest.mark.xfail(reason="the frames of the zygote below the program's are visible to who looks down the stack", strict=False)
async def test_stack_has_no_frames_of_ours(lab: Lab, code: str) -> None:
    result = await lab.run(code)
    assert "/opt/service" not in result.stderr


# -- value and completed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 3\nx", "3"),
        ("x = 3", None),
        ("None", None),
        ("print(1)", None),
        ("'é\\n'", "'é\\n'"),
        ("from __future__ import annotations\nf = lambda: 1\nf()", "1"),
        ("[i for i in range(3)]  # done", "[0, 1, 2]"),
        ("if True:\n    5", None),
        ("", None),
        ("def f(): pass\n(f.__name__)", "'f'"),
    ],
)
async def test_value_is_the_repr_of_a_last_expression(lab: Lab, code: str, value: str | None) -> None:
    result = await lab.run(code, echo_value=True)
    assert (result.status, result.value, result.completed) == ("ok", value, True)


async def test_no_value_unless_asked_for(lab: Lab) -> None:
    assert (await lab.run("1 + 1")).value is None


async def test_exception_in_repr_is_the_programs_error(lab: Lab) -> None:
    result = await lab.run("class A:\n    def __repr__(self): raise ValueError('no repr')\nA()", echo_value=True)
    assert (result.status, result.value, result.completed) == ("error", None, False)
    assert "line 2, in __repr__" in result.stderr and "/opt/service" not in result.stderr


async def test_huge_value_is_cut(lab: Lab) -> None:
    result = await lab.run("'x' * 1_000_000", echo_value=True)
    assert result.status == "ok" and result.value is not None and 60_000 < len(result.value) <= 65536


async def test_value_with_lone_surrogates_is_text(lab: Lab) -> None:
    result = await lab.run("class A:\n    def __repr__(self): return '\\ud800x'\nA()", echo_value=True)
    assert (result.status, result.value) == ("ok", "\\ud800x")


async def test_syntax_error_line_is_right_with_echo_value(lab: Lab) -> None:
    result = await lab.run("x = 1\ny = = 2", echo_value=True)
    assert 'File "/main.py", line 2' in result.stderr


@pytest.mark.parametrize(
    ("code", "completed"),
    [
        ("pass", True),
        ("import os; os._exit(0)", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os.kill(os.getpid(), 15)", False),
        ("1 / 0", False),
        ("import atexit, os; atexit.register(os._exit, 0)", True),
        ("import threading\ndef f(): 1 / 0\nthreading.Thread(target=f).start()", True),
    ],
)
async def test_completed_says_if_the_last_line_was_reached(lab: Lab, code: str, completed: bool) -> None:
    assert (await lab.run(code)).completed is completed


async def test_overwritten_builtins_change_only_the_programs_manners(lab: Lab) -> None:
    code = """
        import sys, os, threading, builtins, atexit
        os._exit = sys.exit = threading._shutdown = atexit._run_exitfuncs = None
        sys.modules.clear()
        builtins.print = builtins.open = builtins.exec = None
        raise ValueError("still seen")
    """
    result = await lab.run(textwrap.dedent(code))
    assert (result.status, result.exit_code) == ("error", 1)
    assert "still seen" in result.stderr
