"""Programs in other languages than Python: the same sandbox and statuses; each program is compiled once."""

import asyncio
import base64
import itertools
import os
import time

import pytest
from sandbox_harness import Lab, laboratory

from exec_wire import Call, Result, verdict
from worker.compile_cache import OUTPUT, CompileCache
from worker.languages import CPP, LANGUAGES, Compiled, Interpreted, paths

_numbers = itertools.count()

ADD = {
    "cpp": "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "bash": "read a b\necho $((a + b))",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number)\nconsole.log(a + b)",
}
ARGUMENTS = {
    "cpp": '#include <cstdio>\nint main(int n, char** a) { for (int i = 1; i < n; i++) printf("[%s]", a[i]); }',
    "bash": 'for a in "$@"; do printf "[%s]" "$a"; done',
    "javascript": "process.stdout.write(process.argv.slice(2).map(a => `[${a}]`).join(''))",
}
EXIT_7 = {
    "cpp": '#include <cstdio>\nint main() { fputs("oh", stderr); return 7; }',
    "bash": "printf oh >&2; exit 7",
    "javascript": "process.stderr.write('oh'); process.exitCode = 7",
}
ABORT = {
    "cpp": "#include <cstdlib>\nint main() { abort(); }",
    "bash": "kill -ABRT $$",
    "javascript": "process.kill(process.pid, 'SIGABRT')",
}
SLEEP = {
    "cpp": "#include <unistd.h>\nint main() { sleep(60); }",
    "bash": "sleep 60",
    "javascript": "setTimeout(() => {}, 60000)",
}
SPIN = {
    "cpp": "int main() { for (volatile int i = 0;; i = i + 1) {} }",
    "bash": "while :; do :; done",
    "javascript": "for (;;) {}",
}
PROBE = {
    "cpp": '#include <cstdio>\n#include <unistd.h>\nint main() { FILE* f = fopen("in.txt", "r"); int c = fgetc(f); '
    'f = fopen("out.txt", "w"); fputc(c + 1, f); printf("%d", getuid() != 0); }',
    "bash": "read -n1 c < in.txt; printf b > out.txt; printf %d $(( $(id -u) != 0 ))",
    "javascript": "const fs = require('fs'); fs.readFileSync('in.txt'); fs.writeFileSync('out.txt', 'b'); "
    "process.stdout.write(String(Number(process.getuid() !== 0)))",
}
SAY_WORD = {
    "cpp": '#include <cstdio>\n#include <cstdlib>\nint main() { puts(getenv("WORD")); }',
    "bash": "echo $WORD",
    "javascript": "console.log(process.env.WORD)",
}
NEEDS_ROOM = {"javascript": {"memory_mb": 1024}}  # node reserves much

languages = pytest.mark.parametrize("language", ["cpp", "bash", "javascript"])


async def run(lab: Lab, language: str, code: str, **fields: object) -> Result:
    if language not in paths():
        pytest.skip(f"{language} is not installed")
    limits = {"wall_s": 20, "cpu_s": 20} | NEEDS_ROOM.get(language, {})
    return await lab.run(code, language=language, **(limits | fields))


def fresh(code: str) -> str:
    """Not compiled before."""
    return f"{code}\n// {time.monotonic_ns()} {next(_numbers)}"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of all compilations from now on."""
    started: list[str] = []
    compile_ = CompileCache._compile

    async def counted(self: CompileCache, key: str, *rest: object) -> None:
        started.append(key)
        await compile_(self, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CompileCache, "_compile", counted)
    return started


# -- every language -------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, str], dict[str, object], dict[str, object]]] = {
    "stdin_is_read_and_stdout_comes_back": (
        ADD,
        {"stdin": "20 22"},
        {"status": "ok", "stdout": "42\n", "stderr": "", "exit_code": 0},
    ),
    "arguments_arrive_as_they_are": (ARGUMENTS, {"argv": ["a b", "", "$x", "é", "-n"]}, {"stdout": "[a b][][$x][é][-n]"}),
    "exit_code_and_stderr_are_the_programs": (
        EXIT_7,
        {},
        {"status": "error", "blame": "model", "exit_code": 7, "stderr": "oh"},
    ),
    "signal_is_told": (ABORT, {}, {"status": "signal", "blame": "model", "signal": 6}),
    "wall_limit_is_timeout": (SLEEP, {"wall_s": 1}, {"status": "timeout", "blame": "model"}),
    "cpu_limit_is_cpu_limit": (SPIN, {"cpu_s": 1}, {"status": "cpu_limit", "blame": "model"}),
    "files_go_in_and_out_and_nobody_is_root": (
        PROBE,
        {"files": {"in.txt": "YQ=="}, "fetch_files": ["out.txt"]},
        {"status": "ok", "stdout": "1", "files": {"out.txt": "Yg=="}},
    ),
    "environment_is_the_callers": (SAY_WORD, {"env": {"WORD": "magic"}}, {"stdout": "magic\n"}),
}


@languages
@pytest.mark.parametrize("case", CASES)
async def test_program_of_every_language(lab: Lab, language: str, case: str) -> None:
    codes, fields, expected = CASES[case]
    result = await run(lab, language, codes[language], **fields)
    assert {name: getattr(result, name) for name in expected} == expected, result.stderr


@languages
async def test_output_beyond_its_limit_is_cut_and_far_beyond_is_stopped(lab: Lab, language: str) -> None:
    loud = {
        "cpp": '#include <cstdio>\nint main() { for (;;) puts("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"); }',
        "bash": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
        "javascript": "const fs = require('fs'); for (;;) fs.writeSync(1, 'x'.repeat(1000))",
    }
    result = await run(lab, language, loud[language], output_kb=4)
    assert (result.status, result.truncated) == ("output_limit", True)
    assert len(result.stdout) < 5000


@languages
async def test_code_that_is_no_program_is_the_models_fault(lab: Lab, language: str) -> None:
    result = await run(lab, language, "if ( { this is not )(")
    assert (result.status, result.blame) == ("compile_error" if language == "cpp" else "error", "model")
    assert result.stderr and result.stdout == ""


# -- C++ ------------------------------------------------------------------------------------------------------------------


async def cpp(lab: Lab, code: str, **fields: object) -> Result:
    return await run(lab, "cpp", code, **fields)


async def test_compiler_speaks_in_stderr(lab: Lab) -> None:
    result = await cpp(lab, fresh("int main() { return undeclared; }"))
    assert (result.status, result.blame, result.retryable) == ("compile_error", "model", False)
    assert "main.cpp:1" in result.stderr and "undeclared" in result.stderr


async def test_linker_error_is_a_compile_error(lab: Lab) -> None:
    result = await cpp(lab, fresh("int f(); int main() { return f(); }"))
    assert result.status == "compile_error" and "undefined reference" in result.stderr


async def test_unknown_flag_is_a_compile_error(lab: Lab) -> None:
    result = await cpp(lab, fresh("int main() {}"), compile_args=["--no-such-flag"])
    assert result.status == "compile_error" and "no-such-flag" in result.stderr


async def test_flags_are_the_callers(lab: Lab) -> None:
    code = fresh('#include <cstdio>\nint main() { printf("%ld %d", __cplusplus, N); }')
    assert (await cpp(lab, code, compile_args=["-std=c++20", "-DN=5"])).stdout == "202002 5"
    assert (await cpp(lab, code, compile_args=["-std=c++17", "-DN=6"])).stdout == "201703 6"


async def test_second_run_is_not_compiled_again(lab: Lab, compilations: list[str]) -> None:
    code = fresh(ADD["cpp"])
    first, second = [await cpp(lab, code, stdin="1 2") for _ in range(2)]
    assert (first.stdout, second.stdout, len(compilations)) == ("3\n", "3\n", 1)
    assert second.timings.start_ms < first.timings.start_ms / 3


async def test_other_code_and_other_flags_are_compiled_anew(lab: Lab, compilations: list[str]) -> None:
    code = fresh(ADD["cpp"])
    for text, flags in ((code, []), (code + " ", []), (code, ["-O1"]), (code, ["-O1", ""]), (code, ["-O1"]), (code, [])):
        await cpp(lab, text, compile_args=flags)
    assert len(compilations) == 4
    assert len(set(compilations)) == 4


async def test_compile_errors_are_not_kept(lab: Lab, compilations: list[str]) -> None:
    code = fresh("int main( {")
    for _ in range(2):
        assert (await cpp(lab, code)).status == "compile_error"
    assert len(compilations) == 2


async def test_calls_that_come_together_share_one_compilation(compilations: list[str]) -> None:
    async with laboratory(slots=6) as lab:
        code = fresh(ADD["cpp"])
        results = await asyncio.gather(*(cpp(lab, code, stdin=f"{n} 1") for n in range(6)))
        assert [result.stdout for result in results] == [f"{n + 1}\n" for n in range(6)]
        assert len(compilations) == 1


async def test_calls_that_come_together_share_one_compile_error(compilations: list[str]) -> None:
    async with laboratory(slots=6) as lab:
        code = fresh("int main( {")
        results = await asyncio.gather(*(cpp(lab, code) for _ in range(6)))
        assert {result.status for result in results} == {"compile_error"}
        assert len({result.stderr for result in results}) == 1 and "error:" in results[0].stderr
        assert len({id(result) for result in results}) == 6
        assert len(compilations) == 1
        await cpp(lab, code)
        assert len(compilations) == 2


async def test_compilation_that_ran_out_of_its_callers_time_leaves_the_others_to_compile(compilations: list[str]) -> None:
    async with laboratory(slots=3) as lab:
        code = fresh('#include <bits/stdc++.h>\nint main() { puts("x"); }')
        hurried = asyncio.create_task(cpp(lab, code, deadline_s=0.1))
        while not compilations:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        results = await asyncio.gather(hurried, cpp(lab, code), cpp(lab, code))
        assert (results[0].status, results[0].blame) == ("timeout", "infra")
        assert [result.stdout for result in results[1:]] == ["x\n", "x\n"]


async def test_cancelled_compilation_leaves_the_others_to_compile(compilations: list[str]) -> None:
    async with laboratory(slots=3) as lab:
        code = fresh('#include <bits/stdc++.h>\nint main() { puts("x"); }')
        calls = [asyncio.create_task(cpp(lab, code)) for _ in range(3)]
        while not compilations:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        calls[0].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [result.stdout for result in results[1:] if isinstance(result, Result)] == ["x\n", "x\n"]
        assert len(compilations) == 2


@pytest.mark.slow  # tests/hostile has one too
async def test_template_bomb_costs_the_compilers_limits_and_no_more(lab: Lab) -> None:
    """The compiler runs out of memory in some seconds, or of time."""
    bomb = """
template <int N, long M> struct F { enum { v = F<N - 1, 2 * M>::v + F<N - 1, 2 * M + 1>::v }; };
template <long M> struct F<0, M> { enum { v = 1 }; };
int main() { return F<30, 0>::v; }
"""
    result = await cpp(lab, fresh(bomb), deadline_s=120)
    assert (result.status, result.blame) == ("compile_error", "model"), result
    assert (await lab.output("print(1)")) == "1\n"


async def test_reading_what_is_outside_does_not_compile_it_in(lab: Lab) -> None:
    result = await cpp(lab, fresh('#include "/etc/shadow"\nint main() {}'))
    assert result.status == "compile_error"
    assert "root:" not in result.stderr


async def test_program_that_deletes_itself_runs_again(lab: Lab, compilations: list[str]) -> None:
    code = fresh("""
#include <cstdio>
#include <fcntl.h>
#include <unistd.h>
int main(int, char** argv) {
    char self[4096]; long n = readlink("/proc/self/exe", self, sizeof self - 1); self[n > 0 ? n : 0] = 0;
    unlink(self); unlink(argv[0]);
    int fd = open("/proc/self/exe", O_WRONLY | O_TRUNC);
    long wrote = fd >= 0 ? write(fd, "x", 1) : -1;
    for (int i = 3; i < 64; i++) if (ftruncate(i, 0) == 0 && pwrite(i, "x", 1, 0) == 1) wrote = 2;
    printf("%ld\\n", wrote);
}
""")
    for _ in range(3):
        result = await cpp(lab, code)
        assert (result.status, result.stdout) == ("ok", "-1\n"), result.stderr
    assert len(compilations) == 1


async def test_memory_limit_is_told(lab: Lab) -> None:
    code = "#include <vector>\nint main() { std::vector<char> v(1 << 30, 'x'); return v[12345] == 'y'; }"
    result = await cpp(lab, code, memory_mb=64)
    assert (result.status, result.blame) == ("memory_limit", "model")


async def test_segmentation_fault_is_signal_11(lab: Lab) -> None:
    result = await cpp(lab, "int main() { volatile int* p = nullptr; return *p; }")
    assert (result.status, result.signal) == ("signal", 11)


async def test_cache_drops_what_was_not_used_for_longest(compilations: list[str]) -> None:
    async with laboratory(slots=1, compile_cache_bytes=40_000) as lab:  # a program takes some 16 kB
        codes = [fresh("int main() {}") for _ in range(3)]
        for index in (0, 1, 0, 2, 0, 1):
            assert (await cpp(lab, codes[index])).status == "ok"
        assert len(compilations) == 4  # 0, 1, 2, and 1 again


async def test_cache_keeps_a_bounded_number_of_descriptors() -> None:
    async def compile(_: Call) -> Result:
        return verdict("ok", files={OUTPUT: base64.b64encode(b"x").decode()})

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    cache = CompileCache(max_bytes=1 << 20, max_programs=4)
    for number in range(20):
        os.close(await cache.program(CPP, Call(code=str(number)), compile))
    assert len(os.listdir("/proc/self/fd")) == before + 4  # noqa: PTH208
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# -- the list -------------------------------------------------------------------------------------------------------------


def test_languages_are_installed_where_their_tools_are() -> None:
    assert "python" in paths() and set(paths()) <= set(LANGUAGES)
    missing = [
        Interpreted("x", command="no-such-tool", source="x"),
        Compiled("y", command="no-such-tool", flags=(), source="y"),
    ]
    assert [language.path() for language in missing] == [None, None]
