"""Programs in a model's text, and outputs that count as right."""

import pytest

from exec_service.compat.completions import extract, same_output


@pytest.mark.parametrize(
    ("text", "language", "code", "found"),
    [
        ("a\n```python\nx\n```\nb", "python", "x\n", "fenced"),
        ("```\nplain\n```\n```py\nx\n```\n```python\ny\n```", "python", "x\n", "fenced"),
        ("```text\nno\n```\n```\nx\n```", "python", "x\n", "fenced"),
        ("```cpp\nx\n```", "cpp", "x\n", "fenced"),
        ("```C++\nx\n```", "cpp", "x\n", "fenced"),
        ("so\n```python\nx\ny", "python", "x\ny", "incomplete_fenced"),
        ("The answer:\nimport math\nprint(1)\n", "python", "import math\nprint(1)", "heuristic"),
        ("print(1)", "python", "print(1)", "heuristic"),
        (" \n", "python", "", "empty"),
    ],
)
def test_extraction(text: str, language: str, code: str, found: str) -> None:
    assert extract(text, language) == (code, found)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("a\nb\n", "a\nb", True),
        ("YES", "yes", True),
        (" a \n b", "a\nb", True),
        ("1.000001", "1", True),
        ("1.0001", "1", False),
        ("1 2", "1.0 2", False),
        ("a\n\nb", "a\nb", False),
        ("", "", True),
        ("nan", "nan", True),
    ],
)
async def test_comparison(output: str, expected: str, same: bool) -> None:
    assert await same_output(output, expected) is same
