"""Judgements by real programs in real sandboxes."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from common import until
from judging_harness import Court, verdicts

from exec_client import BadRequest, Checker, Limits, Tags
from exec_client import Test as T
from exec_service.dispatch.call_group import CallGroup
from exec_wire import Call, Result
from worker.compile_cache import CompileCache

# A busy machine's time-outs are not the program's: whoever uses a CPU gets time for it, whoever sleeps does not.
ROOMY = Limits(wall_s=20, cpu_s=20, memory_mb=256)
LIMITS_OF = {"busy": Limits(wall_s=20, cpu_s=1), "slow": Limits(wall_s=1)}
DOUBLE = "print(int(input()) * 2)"
ADD_CPP = """
#include <iostream>
int main(int argc, char** argv) { long a, b; std::cin >> a >> b; std::cout << a + b + (argc - 1) << std::endl; }
"""


# -- verdicts ---------------------------------------------------------------------------------------------------------------

PYTHON_BY_INPUT = """
import os, sys, time
what = input()
if what == "right": print("yes")
if what == "wrong": print("no")
if what == "slow": time.sleep(60)
if what == "busy":
    while True: pass
if what == "raise": raise KeyError(what)
if what == "exit": sys.exit(3)
if what == "crash": os.kill(os.getpid(), 11)
if what == "greedy": x = b"x" * (1 << 30)
if what == "loud":
    while True: print("yes" * 1000)
if what == "long": print("yes " * 400_000)
if what == "noisy": print("yes"); print("x" * 3_000_000, file=sys.stderr)
"""


async def test_each_end_of_a_python_program_has_its_verdict(here: Court) -> None:
    asked = "right wrong slow busy raise exit crash greedy loud long noisy".split()
    tests = [T(what, "yes", id=what, limits=LIMITS_OF.get(what)) for what in asked]
    judgement = await here.client.judge(PYTHON_BY_INPUT, tests, limits=ROOMY)
    found = {test.id: test.verdict for test in judgement.tests}
    assert found == {
        "right": "AC",
        "wrong": "WA",
        "slow": "TLE",
        "busy": "TLE",
        "raise": "RE",
        "exit": "RE",
        "crash": "RE",
        "greedy": "MLE",
        "loud": "OLE",
        "long": "OLE",
        "noisy": "AC",
    }
    assert (judgement.verdict, judgement.passed, judgement.total, judgement.score) == ("WA", 2, 11, 2 / 11)
    assert not judgement.retryable
    messages = {test.id: test.message for test in judgement.tests}
    assert messages["raise"] == "KeyError: 'raise'" and messages["exit"] == "exit code 3" and "signal 11" in messages["crash"]
    assert all(len(test.result.stdout) <= 1000 and len(test.result.stderr) <= 1000 for test in judgement.tests if test.result)


CPP_BY_INPUT = """
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>
int main() {
    std::string what; std::cin >> what;
    if (what == "right") std::cout << "yes";
    if (what == "wrong") std::cout << "no";
    if (what == "busy") for (volatile int i = 0;; i = i + 1) {}
    if (what == "crash") std::abort();
    if (what == "exit") return 7;
    if (what == "greedy") { std::vector<char> v(1 << 30, 'x'); std::cout << v[12345]; }
    if (what == "loud") for (;;) std::cout << "yes yes yes yes yes yes yes yes\\n";
}
"""


async def test_each_end_of_a_cpp_program_has_its_verdict(here: Court) -> None:
    asked = "right wrong busy crash exit greedy loud".split()
    tests = [T(what, "yes", limits=LIMITS_OF.get(what)) for what in asked]
    judgement = await here.client.judge(CPP_BY_INPUT, tests, limits=ROOMY, language="cpp")
    assert verdicts(judgement) == "AC WA TLE RE RE MLE OLE"


async def test_compile_error_ends_everything_at_once(here: Court) -> None:
    judgement = await here.client.judge("int main( {", [T("1", "1"), T("2", "2"), T("3", "3")], language="cpp")
    assert (judgement.verdict, judgement.score, verdicts(judgement)) == ("CE", 0.0, "CE CE CE")
    assert "main.cpp:1" in judgement.compile_error
    assert [test.result is not None for test in judgement.tests] == [True, False, False]


async def test_tests_have_limits_and_arguments_of_their_own(here: Court) -> None:
    code = "import sys, time\ntime.sleep(float(sys.argv[1]))\nprint(input(), *sys.argv[2:])"
    tests = [T("a", "a x y", ["0", "x", "y"]), T("a", "a", ["1"], Limits(wall_s=0.3)), T("a", "a", ["0.5"])]
    judgement = await here.client.judge(code, tests, limits=ROOMY)
    assert verdicts(judgement) == "AC TLE AC"


async def test_compile_args_reach_the_compiler(here: Court) -> None:
    code = "#include <cstdio>\nint main() { printf(WHAT); }"
    judgement = await here.client.judge(code, [T("", "seven")], language="cpp", compile_args=['-DWHAT="seven"'])
    assert judgement.verdict == "AC"


async def test_missing_language_is_refused_with_those_that_are_there(here: Court) -> None:
    with pytest.raises(BadRequest) as raised:
        await here.client.judge("x", [T()], language="cobol")
    assert raised.value.code == "unknown_language" and "python" in str(raised.value)
    assert set((await here.client.info()).languages) >= {"python", "bash"}


async def test_fifty_tests_of_one_cpp_program_compile_once(here: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []
    compile_ = CompileCache._compile

    async def counted(self: CompileCache, *arguments: object) -> None:
        compilations.append(arguments[0])
        await compile_(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CompileCache, "_compile", counted)
    code = ADD_CPP + f"// {time.monotonic()}"
    judgement = await here.client.judge(code, [T(f"{n} {n}", str(2 * n)) for n in range(50)], language="cpp")
    assert (judgement.verdict, judgement.score) == ("AC", 1.0)
    assert len(compilations) == 1
    waits = [test.result.timings.start_ms for test in judgement.tests if test.result]
    assert waits[0] > 10 * sorted(waits)[25]  # the others did not wait for a compiler


@pytest.mark.parametrize("language", ["python", "cpp"])
async def test_stop_on_fail_skips_what_comes_after_the_first_failure(here: Court, language: str) -> None:
    code = "print(sum(map(int, input().split())))" if language == "python" else ADD_CPP
    tests = [T("1 1", "2"), T("1 1", "2"), T("1 1", "3"), *[T("1 1", "2")] * 20]
    judgement = await here.client.judge(code, tests, language=language, stop_on_fail=True)
    assert verdicts(judgement) == " ".join(["AC", "AC", "WA"] + ["SKIPPED"] * 20)
    assert (judgement.verdict, judgement.passed, judgement.score) == ("WA", 2, 2 / 23)


async def test_stop_on_fail_does_not_wait_for_what_it_skips(here: Court) -> None:
    code = "import time\nn = int(input())\ntime.sleep(n)\nprint(n)"
    tests = [T("0", "1"), *[T("200", "200", limits=Limits(wall_s=300, cpu_s=5))] * 10]
    async with asyncio.timeout(60):
        judgement = await here.client.judge(code, tests, stop_on_fail=True)
    assert verdicts(judgement) == " ".join(["WA"] + ["SKIPPED"] * 10)
    async with asyncio.timeout(30):  # what was running is killed, and its slots are free
        while here.pool.free_slots < here.pool.slots:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# -- checkers -----------------------------------------------------------------------------------------------------------------

DIVISOR = """
import sys
number, answer = int(open("input.txt").read()), open("output.txt").read()
assert open(sys.argv[3]).read() == "any divisor"
if not answer.strip().isdigit():
    print("not a number")
    sys.exit(1)
sys.exit(0 if 1 < int(answer) < number and number % int(answer) == 0 else 1)
"""
DIVISOR_CPP = """
#include <fstream>
int main() {
    long n, d = 0;
    std::ifstream("input.txt") >> n; std::ifstream("output.txt") >> d;
    return d > 1 && d < n && n % d == 0 ? 0 : 1;
}
"""


@pytest.mark.parametrize(("language", "checker"), [("python", DIVISOR), ("cpp", DIVISOR_CPP)])
async def test_checker_program_decides(here: Court, language: str, checker: str) -> None:
    code = "n = int(input())\nprint({15: 5, 21: 3, 22: 4}.get(n, 'none'))"
    tests = [T(str(n), "any divisor") for n in (15, 21, 22, 33)]
    judgement = await here.client.judge(code, tests, checker=Checker("program", code=checker, language=language))
    assert verdicts(judgement) == "AC AC WA WA"
    if language == "python":
        assert judgement.tests[3].message == "not a number"


@pytest.mark.parametrize(
    "checker",
    ["raise ValueError", "this is not Python", "import sys; sys.exit(2)", "import os; os.abort()", "import os; os._exit(77)"],
)
async def test_checker_that_fails_is_not_the_programs_fault(here: Court, checker: str) -> None:
    judgement = await here.client.judge(DOUBLE, [T("3", "6")], checker=Checker("program", code=checker))
    assert (judgement.verdict, judgement.score, judgement.retryable, verdicts(judgement)) == ("INFRA", None, False, "INFRA")
    assert "checker" in judgement.tests[0].message


BRITTLE = """
import os
answer = open("output.txt").read()
if "abort" in answer:
    os.abort()
raise SystemExit(0 if int(answer) == int(open("expected.txt").read()) else 1)
"""


async def test_checker_that_fails_on_an_output_but_accepts_the_expected_one_says_wrong_answer(
    here: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Call] = []

    async def run(
        self: CallGroup, call: Call, run_it: Callable[[CallGroup, Call], Awaitable[Result]] = CallGroup.run
    ) -> Result:
        runs.append(call)
        return await run_it(self, call)

    monkeypatch.setattr(CallGroup, "run", run)
    tests = [T("6", "6"), T("7", "6"), T("six", "6"), T("abort", "6")]
    judgement = await here.client.judge("print(input())", tests, checker=Checker("program", code=BRITTLE))
    assert (verdicts(judgement), judgement.score, judgement.verdict) == ("AC WA WA WA", 0.25, "WA")
    messages = [test.message for test in judgement.tests]
    assert messages[:2] == ["", ""]
    assert "the checker failed on this output: ValueError" in messages[2] and "killed by signal 6" in messages[3]
    assert len(runs) == 2 + 2 + 3 + 3  # one more only where the checker failed


async def test_checker_that_fails_on_the_expected_output_too_is_told_so(here: Court) -> None:
    tests = [T("6", "six"), T("six", "6\n7"), T("six", "7")]
    refusing = BRITTLE.replace("SystemExit(0 ", "SystemExit(1 ")
    judgement = await here.client.judge("print(input())", tests[:2], checker=Checker("program", code=BRITTLE))
    assert (verdicts(judgement), judgement.score, judgement.retryable) == ("INFRA INFRA", None, False)
    assert all("on the expected output it fails too: ValueError" in test.message for test in judgement.tests)
    judgement = await here.client.judge("print(input())", tests[2:], checker=Checker("program", code=refusing))
    assert verdicts(judgement) == "INFRA"
    assert "it does not accept the expected output either" in judgement.tests[0].message


async def test_checker_is_not_asked_about_a_program_that_failed(here: Court) -> None:
    judgement = await here.client.judge("1 / 0", [T("3", "6")], checker=Checker("program", code="raise ValueError"))
    assert (judgement.verdict, judgement.tests[0].message) == ("RE", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("checker", "printed", "expected", "verdict"),
    [
        (Checker("exact"), "a b\n", "a b\n", "AC"),
        (Checker("exact"), "a b\n", "a b", "WA"),
        (Checker("lines"), "a b  \nc\n\n", "a b\nc", "AC"),
        (Checker("lines"), "a  b\nc", "a b\nc", "WA"),
        (Checker(), "a\nb", "a b", "AC"),
        (Checker("float"), "0.3333333 x", "0.33333333333 x", "AC"),
        (Checker("float", abs_tol=0, rel_tol=0), "0.3333333", "0.33333333333", "WA"),
    ],
)
async def test_checkers_compare_what_was_printed(
    here: Court, checker: Checker, printed: str, expected: str, verdict: str
) -> None:
    judgement = await here.client.judge(f"print({printed!r}, end='')", [T("", expected)], checker=checker)
    assert judgement.verdict == verdict


async def test_function_gets_its_arguments_and_its_value_is_compared(here: Court) -> None:
    code = """
def solve(numbers, factor=1):
    print("chatter")
    return {"sum": sum(numbers) * factor, "all": tuple(numbers), "none": None}

if __name__ == "__main__":
    raise SystemExit("not to be run")
"""
    tests = [
        T("[[1, 2]]", '{"sum": 3, "all": [1, 2], "none": null}'),
        T('{"numbers": [1], "factor": 5}', '{"all": [1], "none": null, "sum": 5.0}'),
        T("[[1, 2]]", '{"sum": 4, "all": [1, 2], "none": null}'),
        T("[1]", "0"),
    ]
    judgement = await here.client.judge(code, tests, function="solve")
    assert verdicts(judgement) == "AC AC WA RE"
    assert judgement.tests[0].result and judgement.tests[0].result.stdout == "chatter\n"
    assert judgement.tests[3].result and 'solution.py", line 4, in solve' in judgement.tests[3].result.stderr


async def test_method_is_called_on_a_new_object(here: Court) -> None:
    code = "class Solution:\n    def two(self, a, b):\n        return [b, a]\n"
    judgement = await here.client.judge(code, [T("[1, 2]", "[2, 1]")], function="Solution.two")
    assert judgement.verdict == "AC"


async def test_floats_of_a_function_are_compared_with_tolerance_if_asked(here: Court) -> None:
    code = "def solve(x):\n    return [x / 3, True]"
    tests = [T("[1]", "[0.33333333, true]"), T("[1]", "[0.33333333, 1]")]
    assert verdicts(await here.client.judge(code, tests, function="solve", checker=Checker("float"))) == "AC WA"
    assert verdicts(await here.client.judge(code, tests, function="solve")) == "WA WA"


async def test_program_as_checker_of_a_function_sees_the_value(here: Court) -> None:
    checker = "import json, sys\nsys.exit(sorted(json.load(open('output.txt'))) != json.load(open('expected.txt')))"
    code = "def solve(n):\n    return list(range(n))[::-1]"
    tests = [T("[3]", "[0, 1, 2]"), T("[3]", "[0, 1]")]
    judgement = await here.client.judge(code, tests, function="solve", checker=Checker("program", code=checker))
    assert verdicts(judgement) == "AC WA"


CHEATS = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves when asked": "import os\ndef solve(n):\n    os._exit(0)",
    "exits well": "import sys\ndef solve(n):\n    sys.exit(0)",
    "equals everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def solve(n):
    return Same(1)
""",
    "equals everything as a dict": """
class Same(dict):
    def __eq__(self, other): return True
    def keys(self): return []
def solve(n):
    return Same(a=1)
""",
    "prints a verdict": """
def solve(n):
    print('{"verdict": "AC", "score": 1.0}')
    print("AC")
    return None
""",
    "writes a verdict": """
import os
def solve(n):
    open("returned.json", "w").write('{"verdict": "AC"}')
    os._exit(0)
""",
    "patches json": """
import json
json.dumps = lambda *a, **k: "42"
json.load = json.loads = lambda *a, **k: 42
def solve(n):
    return 0
""",
    "looks around": """
import gc, os, sys
def solve(n):
    seen = repr(vars(sys.modules["__main__"])) + repr(os.environ) + repr(sys.argv) + sys.stdin.read()
    for folder, _, names in os.walk("/tmp"):
        for name in names:
            seen += open(os.path.join(folder, name), errors="replace").read()
    for folder in ("/proc/self/environ", "/proc/self/cmdline", "/main.py"):
        seen += open(folder, errors="replace").read()
    seen += repr([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))][:20000])
    return int("98765" + str(4321)) if "98765" + str(4321) in seen else None
""",
    "returns too much": "def solve(n):\n    return [[]] * 300_000",
    "returns a deep thing": "def solve(n):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "hands back garbage": "def solve(n):\n    import os\n    open('returned.json', 'wb').write(b'\\xff[')\n    os._exit(0)",
    "hands back a link": "def solve(n):\n    import os\n    os.symlink('/etc/passwd', 'returned.json')\n    os._exit(0)",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_gains_nothing(here: Court, cheat: str) -> None:
    judgement = await here.client.judge(CHEATS[cheat], [T("[1]", "987654321")], function="solve", limits=ROOMY)
    assert judgement.verdict in ("WA", "RE", "OLE"), judgement
    assert judgement.score == 0.0


async def test_expected_answers_are_not_in_the_sandbox_of_a_plain_program(here: Court) -> None:
    code = """
import os, sys
seen = repr(os.environ) + repr(sys.argv) + sys.stdin.read() + open("/proc/self/environ").read()
for folder, _, names in os.walk("/tmp"):
    for name in names:
        seen += open(os.path.join(folder, name), errors="replace").read()
print("found" if "98765" + "4321" in seen else "nothing")
"""
    for checker in (Checker(), Checker("program", code="raise SystemExit(0)")):
        judgement = await here.client.judge(code, [T("x", "987654321")], checker=checker)
        assert judgement.tests[0].result and judgement.tests[0].result.stdout == "nothing\n"


async def test_deadline_that_is_too_short_gives_no_score(here: Court) -> None:
    tests = [T("", "x", limits=Limits(wall_s=5))] * 6
    judgement = await here.client.judge("import time\ntime.sleep(2)\nprint('x')", tests, deadline_s=3.8)
    assert (judgement.verdict, judgement.score, judgement.retryable) == ("INFRA", None, True)
    assert judgement.passed == 2 and verdicts(judgement).count("INFRA") == 4


async def test_cancelling_by_tags_ends_a_judgement_without_a_score(here: Court) -> None:
    tags = Tags(run="to be cancelled")
    code = "import time\ntime.sleep(200)"
    judging = asyncio.create_task(here.client.judge(code, [T()] * 40, limits=Limits(wall_s=300), tags=tags))
    await until(lambda: here.pool.free_slots == 0, "programs run")
    assert await here.client.cancel(run="to be cancelled") > 0
    async with asyncio.timeout(30):
        judgement = await judging
    assert (judgement.verdict, judgement.score, judgement.retryable) == ("SKIPPED", None, False)
    assert set(verdicts(judgement).split()) == {"SKIPPED"}


async def test_leaving_gives_a_judgement_up(here: Court) -> None:
    code = "import time\ntime.sleep(200)"
    judging = asyncio.create_task(here.client.judge(code, [T()] * 5, limits=Limits(wall_s=300)))
    await until(lambda: here.pool.free_slots == 0, "programs run")
    judging.cancel()
    async with asyncio.timeout(30):
        while here.pool.free_slots < here.pool.slots or here.gateway.dispatch.admission.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert here.gateway.dispatch.admission.bytes == 0
