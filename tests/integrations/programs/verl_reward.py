"""verl's reward by SandboxFusion, as it is published; loaded from its own folder, since `import verl` would want torch."""

import importlib.metadata
import sys
import threading
from pathlib import Path

files = importlib.metadata.files("verl") or []
package = next(file for file in files if str(file).endswith("reward_score/sandbox_fusion/__init__.py"))
sys.path.insert(0, str(Path(package.locate()).parents[1]))

import sandbox_fusion  # noqa: E402
from sandbox_fusion.utils import check_correctness  # noqa: E402

url = sys.argv[1] + "/run_code"
gate = threading.Semaphore(16)


def score(completion: str, cases: dict, **fields: object) -> float:
    return sandbox_fusion.compute_score(url, gate, 1024, completion, cases, **fields)[0]


double = "```python\nprint(int(input()) * 2)\n```"
cases = {"inputs": [str(n) for n in range(12)], "outputs": [str(2 * n) for n in range(12)]}
assert score(double, cases) == 1.0
half = {"inputs": ["1", "2"], "outputs": ["2", "5"]}
assert score(double, half, continuous=True) == 0.5
assert score("no program", cases) == 0.0
assert (
    score(
        "```python\nassert add(1, 2) == 3\n```".replace("assert", "def add(a, b): return a + b\nassert"),
        {"assert_case": ["assert add(2, 2) == 4"]},
    )
    == 1.0
)

call = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
assert check_correctness(url, call, "class Solution:\n    def add(self, a, b):\n        return a + b")[0] == [True]
assert check_correctness(url, half, "import time; time.sleep(60)", timeout=1)[0] == [-3, -3]
assert check_correctness(url, half, "1/0")[0] == [-2, -2]
assert check_correctness(url, half, "int main( {", language="cpp")[0] == [-4, -4]
[[status], [told]] = check_correctness(url, {"inputs": [None], "outputs": [None]}, "x", language="rust")
assert (status, told["status"]) == (-1, "sandbox_error")
print("all as expected")
