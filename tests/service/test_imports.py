"""Imports flow in one direction: what each package may import, and the known exceptions by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANY = {"exec_wire", "exec_client", "exec_service", "worker", "worker.sandbox", "grpo_roc", "loadtest"}
MAY_IMPORT = {
    "exec_wire": set[str](),
    "exec_client": {"exec_wire"},
    "exec_service": {"exec_wire", "exec_client"},
    "exec_service.cli": {"exec_wire", "exec_client", "exec_service", "worker", "worker.sandbox"},
    "worker": {"exec_wire", "worker.sandbox"},
    "worker.sandbox": {"exec_wire"},
    "grpo_roc": {"exec_wire", "exec_client"},
    "loadtest": ANY - {"grpo_roc"},  # not installed, so nothing imports it
}
LAYERS = [  # of exec_service; each imports only layers above it in this list
    {"refusals", "config"},
    {"tenants", "telemetry"},
    {"dispatch"},
    {"judging", "jobs", "sessions"},
    {"api"},
    {"rpc", "compat"},
    {"app", "cluster_parts"},
    {"cli", "ray"},
    {"__main__"},
]
EXCEPTIONS = {
    ("exec_service.config", "worker.config"): "the names of a worker's settings, to find misspelt variables",
    ("exec_service.telemetry.worker_metrics", "worker.consumer"): "reads the figures of a worker",
    ("exec_service.telemetry.worker_metrics", "worker.echo"): "reads the figures of a worker",
    ("exec_service.telemetry.worker_metrics", "worker.pool"): "reads the figures of a worker",
    ("exec_service.telemetry.metrics", "exec_service.api.web_page"): "the paths of the web page as values of a label",
    ("exec_service.telemetry.metrics_server", "exec_service.api.connections"): "a server of its own for metrics",
    ("exec_service.telemetry.metrics_server", "exec_service.api.listening"): "a server of its own for metrics",
    (
        "exec_service.tenants.accounts",
        "exec_service.dispatch.admission",
    ): "counts a tenant's calls as admission does",
    ("worker.sandbox.runner", "worker.languages"): "tells the worker which languages are installed",
}


def package(module: str) -> str:
    """The most specific package of `MAY_IMPORT` that holds the module."""
    parts = module.split(".")
    return next(name for size in range(len(parts), 0, -1) if (name := ".".join(parts[:size])) in MAY_IMPORT)


def modules(top: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted((ROOT / top).rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(file.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of this repository that are imported at run time, at the top of a file or inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield from imported(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [_module(node.module, alias.name) for alias in node.names]
        yield from (name for name in names if name.partition(".")[0] in ANY)


def _module(parent: str, name: str) -> str:
    path = ROOT / parent.replace(".", "/") / name
    return f"{parent}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else parent


def layer(module: str) -> int:
    part = module.split(".")[1]
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def allowed(module: str, wanted: str) -> bool:
    if (own := package(module)) == package(wanted) != "exec_service":
        return True
    if module.startswith("exec_service") and wanted.startswith("exec_service."):
        return module.count(".") == 0 or module.split(".")[1] == wanted.split(".")[1] or layer(wanted) < layer(module)
    return package(wanted) in MAY_IMPORT[own]


@pytest.mark.parametrize("top", sorted(name for name in ANY if "." not in name))
def test_imports_flow_in_one_direction(top: str) -> None:
    found = {(module, wanted) for module, tree in modules(top) for wanted in imported(tree) if not allowed(module, wanted)}
    assert sorted(found - set(EXCEPTIONS)) == []
    expected = {pair for pair in EXCEPTIONS if pair[0].partition(".")[0] == top}
    assert sorted(expected - found) == [], "these exceptions are not needed any more: delete their rows"


def test_every_part_of_the_gateway_has_a_layer() -> None:
    parts = {name.split(".")[1] for name, _ in modules("exec_service") if "." in name}
    assert parts == set().union(*LAYERS)
