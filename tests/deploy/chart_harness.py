"""The real helm on the real chart, and what it renders as Python objects."""

import functools
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import yaml
from common import unavailable

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "exec-service"
TOOLS = ROOT / ".tools" / "bin"
SCENARIOS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))

_spec = importlib.util.spec_from_file_location("render_settings", ROOT / "deploy" / "render_settings.py")
assert _spec is not None and _spec.loader is not None
render_settings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render_settings)

Object = dict[str, Any]


@functools.cache
def need_tools() -> str:
    """Fetched on first use; the words of a failure, which skips on a laptop and fails in CI."""
    done = subprocess.run(["sh", "deploy/tools.sh"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    return "" if done.returncode == 0 else f"the tools cannot be fetched: {done.stderr.strip()[-500:]}"


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    if words := need_tools():
        unavailable(words)
    return subprocess.run([TOOLS / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)


def helm(verb: str, scenario: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    release = ["rel"] if verb == "template" else []
    values = str(CHART / "ci" / f"{scenario}-values.yaml")
    return tool("helm", verb, *release, str(CHART), "--namespace", "exec", "--values", values, *arguments)


@functools.cache
def text_of(scenario: str, *arguments: str) -> str:
    done = helm("template", scenario, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(scenario: str, *arguments: str) -> str:
    """The words with which the chart refuses these values."""
    done = helm("template", scenario, *arguments)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


@functools.cache
def render(scenario: str, *arguments: str) -> list[Object]:
    return [found for found in yaml.safe_load_all(text_of(scenario, *arguments)) if found]


def one(objects: list[Object], kind: str, name: str) -> Object:
    [found] = [found for found in objects if (found["kind"], found["metadata"]["name"]) == (kind, f"rel-exec-service{name}")]
    return found


def all_of(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def pods(objects: list[Object]) -> dict[str, Object]:
    """Name of the object -> its pod's spec."""
    specs = {
        found["metadata"]["name"]: found["spec"]["template"]["spec"] for found in objects if "template" in found.get("spec", {})
    }
    return specs | {found["metadata"]["name"]: found["spec"] for found in all_of(objects, "Pod")}


def container(pod: Object, name: str) -> Object:
    [found] = [found for found in pod["containers"] if found["name"] == name]
    return found
