import pytest

from worker.profiles import ProfileChoice, imported

PROFILES = {
    "bare": [],
    "numpy": ["numpy"],
    "math": ["numpy", "scipy", "sympy", "mpmath"],
    "data": ["numpy", "pandas", "matplotlib.pyplot"],
}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import numpy as np", {"numpy"}),
        ("import os, numpy.linalg as la, sys", {"os", "numpy", "sys"}),
        ("from scipy.optimize import minimize", {"scipy"}),
        ("def f():\n\timport sympy\n", {"sympy"}),
        ("x = 1; import pandas", {"pandas"}),
        ("try: import networkx\nexcept ImportError: pass", {"networkx"}),
        ("from . import x", set()),
        ("important = 1", set()),
        ("", set()),
    ],
)
def test_imports_are_seen(code: str, names: set[str]) -> None:
    assert imported(code) == names


@pytest.mark.parametrize(
    ("code", "profile"),
    [
        ("print(1)", "bare"),
        ("import numpy", "numpy"),
        ("import numpy, sympy", "math"),
        ("import pandas", "data"),
        ("import matplotlib.pyplot as plt", "data"),
        ("import networkx", "bare"),
        ("import sympy, pandas", "math"),
    ],
)
def test_smallest_fitting_profile_is_chosen(code: str, profile: str) -> None:
    assert ProfileChoice(PROFILES).choose(code) == profile


def test_choice_among_what_there_is() -> None:
    assert ProfileChoice({"numpy": ["numpy"]}).choose("import sympy") == "numpy"
