"""SandboxFusion's own SDK: run_code, run_jupyter, submit, and its helpers for many calls at once."""

import base64
import sys

import sandbox_fusion as sf

sf.set_endpoint(sys.argv[1] + "/")  # it trims the slash by itself

made = sf.run_code(sf.RunCodeRequest(code="print(input())", language="python", stdin="hi"), max_attempts=1)
assert (made.status, made.run_result.stdout, made.run_result.return_code) == (sf.RunStatus.Success, "hi\n", 0)

slow = sf.run_code(sf.RunCodeRequest(code="import time; time.sleep(60)", language="python", run_timeout=0.5), max_attempts=1)
assert slow.run_result.status == sf.CommandRunStatus.TimeLimitExceeded
mapping = sf.SummaryMapping(RunTimeout="late", RunFailed="failed", CompileFailed="ce")
assert sf.summary_run_code_result(slow, mapping) == "late"
broken = sf.run_code(sf.RunCodeRequest(code="1/0", language="python"), max_attempts=1)
assert sf.summary_run_code_result(broken, mapping) == "failed"
uncompiled = sf.run_code(sf.RunCodeRequest(code="int main( {", language="cpp"), max_attempts=1)
assert sf.summary_run_code_result(uncompiled, mapping) == "ce"

files = sf.RunCodeRequest(
    code="open('b', 'w').write(open('/mnt/a').read() * 2)",
    language="python",
    files={"/mnt/a": base64.b64encode(b"x").decode(), "none": None},
    fetch_files=["b"],
)
assert base64.b64decode(sf.run_code(files, max_attempts=1).files["b"]) == b"xx"

try:
    sf.run_code(sf.RunCodeRequest(code="", language="rust"), max_attempts=1)
    raise SystemExit("a missing language must be an error")
except Exception as error:
    assert "rust" in str(error), error

cells = ["a = 20", "a + 1", "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()", "1/0", "print(a)"]
notebook = sf.run_jupyter(sf.RunJupyterRequest(cells=cells), max_attempts=1)
assert notebook.status == sf.RunStatus.Success and len(notebook.cells) == 5
assert notebook.cells[1].display == [{"text/plain": "21"}] and notebook.cells[4].stdout == "20\n"
assert any("image/png" in shown for shown in notebook.cells[2].display)
assert notebook.cells[3].error[0]["ename"] == "ZeroDivisionError"

requests = [[sf.RunCodeRequest(code=f"print({n} * 2)", language="python")] for n in range(50)]
many = sf.run_concurrent(sf.run_code, args=requests, concurrency=20)
assert [one.run_result.stdout for one in many] == [f"{n * 2}\n" for n in range(50)]

config = sf.TestConfig(
    dataset_type="CommonOJDataset",
    language="python",
    run_timeout=5,
    provided_data={"test": [{"input": {"stdin": "2"}, "output": {"stdout": "4"}}]},
    extra={"run_all_cases": True},
)
completion = "So:\n```python\nprint(int(input()) ** 2)\n```"
judged = sf.submit(sf.SubmitRequest(dataset="mine", id=1, completion=completion, config=config), max_attempts=1)
assert judged.accepted and judged.tests[0].exec_info.status == sf.RunStatus.Success
print("all as expected")
