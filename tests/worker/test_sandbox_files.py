"""Files in and out."""

import base64
from typing import Any

import pytest
from sandbox_harness import Lab, call_of

from worker.sandbox.execution import input_problem


def b64(content: bytes | str) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def plain(files: dict[str, str]) -> dict[str, bytes]:
    return {path: base64.b64decode(content) for path, content in files.items()}


async def test_files_are_where_the_caller_put_them(lab: Lab) -> None:
    files = {"a.txt": b64("1"), "deep/er/b": b64(b"\0\xff"), "/tmp/c": b64("3"), "/mnt/data/d": b64("4"), "ü ": b64("")}
    code = """
        for path in ("a.txt", "/tmp/deep/er/b", "c", "/mnt/data/d", "ü "):
            print(open(path, "rb").read())
    """
    assert await lab.output(code, files=files) == "b'1'\nb'\\x00\\xff'\nb'3'\nb'4'\nb''\n"


async def test_a_path_means_the_same_place_however_it_is_written(lab: Lab) -> None:
    files = {"./a": b64("1"), "b//c": b64("2"), "/tmp/./d": b64("3"), "/mnt/e/./f": b64("4")}
    code = "for path in ('a', 'b/c', 'd', '/mnt/e/f'): print(open(path).read())"
    result = await lab.run(code, files=files, fetch_files=["b/./c", "/tmp//a", ".//d"])
    assert (result.stdout, plain(result.files)) == ("1\n2\n3\n4\n", {"b/./c": b"2", "/tmp//a": b"1", ".//d": b"3"})


async def test_a_file_of_the_callers_can_be_imported(lab: Lab) -> None:
    files = {"helper.py": b64("def f(): return 5"), "pkg/__init__.py": b64("x = 6")}
    assert await lab.output("import helper, pkg\nprint(helper.f(), pkg.x)", files=files) == "5 6\n"


async def test_a_callers_file_that_shadows_a_module_hurts_only_the_program(lab: Lab) -> None:
    files = {f"{name}.py": b64("print('shadow')") for name in ("os", "json", "marshal", "threading", "linecache", "traceback")}
    result = await lab.run("print('ran')\n1 / 0", files=files)
    assert (result.status, result.stdout) == ("error", "ran\n")
    assert "ZeroDivisionError" in result.stderr


async def test_fetched_files_come_back(lab: Lab) -> None:
    code = """
        import os
        os.makedirs("out/deep")
        open("out/deep/a", "wb").write(bytes(range(256)))
        open("/mnt/b", "w").write("b")
        open("empty", "w")
    """
    result = await lab.run(code, fetch_files=["out/deep/a", "/tmp/out/deep/a", "/mnt/b", "empty", "missing", "out"])
    assert plain(result.files) == {
        "out/deep/a": bytes(range(256)),
        "/tmp/out/deep/a": bytes(range(256)),
        "/mnt/b": b"b",
        "empty": b"",
    }


@pytest.mark.parametrize("end", ["1 / 0", "import os; os.abort()", "while True: pass", "x = bytearray(300 << 20)"])
async def test_files_come_back_however_the_program_ended(lab: Lab, end: str) -> None:
    result = await lab.run(f"open('a', 'w').write('kept')\n{end}", fetch_files=["a"], wall_s=0.7, memory_mb=64)
    assert result.status != "ok"
    assert plain(result.files) == {"a": b"kept"}


async def test_nothing_but_a_regular_file_of_the_sandbox_is_fetched(lab: Lab) -> None:
    code = """
        import os, socket
        os.symlink("/etc/passwd", "link"); os.symlink("/proc/self/environ", "magic"); os.symlink("/", "root")
        os.symlink("/proc/1/root", "outside"); os.symlink("real", "harmless"); open("real", "w").write("r")
        os.mkfifo("pipe"); os.mkdir("folder"); socket.socket(socket.AF_UNIX).bind("sock")
        os.chmod("real", 0)
    """
    wanted = "link magic root/etc/passwd outside/etc/shadow harmless pipe folder sock real/x".split()
    result = await lab.run(code, fetch_files=[*wanted, "real"])
    assert result.status == "ok"
    assert plain(result.files) == {"real": b"r"}


async def test_the_folder_itself_may_be_a_link_by_then(lab: Lab) -> None:
    code = "import os\nos.chdir('/')\nos.rename('/w/call/tmp', '/w/call/old')\nos.symlink('/etc', '/w/call/tmp')"
    result = await lab.run(code, fetch_files=["passwd", "ld.so.cache"])
    assert result.files == {}


async def test_a_terabyte_file_is_refused_inside(lab: Lab) -> None:
    result = await lab.run("open('a', 'wb').truncate(1 << 40)", fetch_files=["a"])
    assert result.status == "error" and "File too large" in result.stderr


async def test_fetched_files_together_fit_in_the_limit(lab: Lab) -> None:
    """Names and holes cost a program nothing; the memory they take outside must be bounded all the same."""
    code = """
        import os
        open("small", "w").write("s")
        open("hole", "wb").truncate(3 << 20)
        for i in range(20):
            os.link("hole", f"name{i}")
    """
    result = await lab.run(code, file_mb=4, fetch_files=["hole", *(f"name{i}" for i in range(20)), "small"])
    assert set(result.files) == {"hole", "small"}


async def test_huge_file_limit_needs_no_huge_memory(lab: Lab) -> None:
    result = await lab.run("open('a', 'w').write('x')", file_mb=1 << 16, fetch_files=["a"])
    assert (result.status, plain(result.files)) == ("ok", {"a": b"x"})


async def test_full_workspace_still_answers(lab: Lab) -> None:
    code = """
        try:
            with open("big", "wb") as file:
                while True: file.write(b"x" * 65536)
        except OSError as error:
            print(error.errno)
    """
    result = await lab.run(code, file_mb=2, fetch_files=["big"])
    assert (result.status, result.stdout) == ("ok", "28\n")
    assert 1 << 20 < len(plain(result.files)["big"]) <= 2 << 20


MISFITS: dict[str, dict[str, Any]] = {
    "too_large": {"files": {"a": b64(b"x" * (2 << 20))}, "file_mb": 1},
    "too_large_together": {"files": {f"f{i}": b64("x") for i in range(257)}, "file_mb": 1},
    "too_many": {"files": {f"f{i}": "" for i in range(8200)}},
    "file_and_folder": {"files": {"a": b64("x"), "/tmp/a/b": b64("y")}},
    "same_file_twice": {"files": {"a": b64("x"), "/tmp/a": b64("y")}},
    "placed_above": {"files": {"../main.py": b64("x")}},
    "fetched_from_above": {"fetch_files": ["../main.py"]},
    "fetched_from_above_by_a_detour": {"fetch_files": ["a", "/tmp/a/../../main.py"]},
    "names_a_folder": {"files": {"x/.": ""}},
    "too_deep": {"files": {"d/" * 500 + f"{i}": "" for i in range(7000)}},
    "too_many_variables": {"env": {f"V{i}": "" for i in range(60_000)}},
    "too_many_arguments": {"argv": ["x"] * 60_000},
    "too_many_fetched": {"fetch_files": ["x"] * 60_000},
    "code_too_large": {"code": "#" * (2 << 20), "file_mb": 1},
}


@pytest.mark.parametrize("name", MISFITS)
async def test_files_that_cannot_be_placed_are_the_callers_fault_and_hurt_no_zygote(lab: Lab, name: str) -> None:
    restarts = lab.pool.zygote_restarts
    fields = {"code": "print('ran')"} | MISFITS[name]
    results = [await lab.run(**fields) for _ in range(3)]
    assert {(result.status, result.blame, result.retryable, result.stdout) for result in results} == {
        ("rejected", "client", False, "")
    }
    assert all(result.error for result in results)
    assert lab.pool.zygote_restarts == restarts


async def test_what_just_fits_is_accepted(lab: Lab) -> None:
    size = (1 << 20) - 4096  # one page is the program's own
    result = await lab.run("import os\nprint(os.path.getsize('a'))", files={"a": b64(b"x" * size)}, file_mb=1)
    assert (result.status, result.stdout) == ("ok", f"{size}\n")


async def test_as_many_files_as_there_is_room_for_are_accepted(lab: Lab) -> None:
    files = {f"f{i}": "" for i in range(8180)}
    call = call_of("pass", files=files)
    assert input_problem(call) is None
    assert await lab.output("import os\nprint(len(os.listdir('/tmp')))", files=files, wall_s=20) == "8180\n"


async def test_files_beyond_the_memory_limit_are_memory_limit_and_hurt_no_zygote(lab: Lab) -> None:
    restarts = lab.pool.zygote_restarts
    results = [await lab.run("print('ran')", files={"a": b64(b"x" * (30 << 20))}, memory_mb=16) for _ in range(3)]
    assert {(result.status, result.blame, result.stdout) for result in results} == {("memory_limit", "model", "")}
    assert lab.pool.zygote_restarts == restarts
