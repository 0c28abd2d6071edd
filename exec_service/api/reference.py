"""What the OpenAPI document says of each route beside its types: its section, its name for generated clients, an example.

The order is the one of the page `/docs`. A test sends every example to a running service.
"""

from typing import Any, NamedTuple


class Entry(NamedTuple):
    section: str
    name: str  # of the operation, for generated clients
    example: Any = None  # of the body; text if it is not JSON
    values: dict[str, str] = {}  # of parameters
    summary: str = ""  # of a route of an adapter; the service's own routes have theirs beside them
    headers: dict[str, str] = {}


CALLS, JUDGING, SESSIONS, JOBS, SERVICE = "Calls", "Judging", "Sessions", "Bulk jobs", "The service"
_TESTS = [{"stdin": "2 3", "expected": "5"}, {"stdin": "-1 1", "expected": "0"}]
_ADD = "a, b = map(int, input().split())\nprint(a + b)"
_SUBMISSION = {"type": "python", "solution": _ADD, "input": "2 3", "expected_output": "5"}
_SUBMISSIONS = {"type": "batch", "submissions": [_SUBMISSION]}
_MCP_CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "python", "arguments": {"code": "print(6 * 7)"}},
}
_SUBMIT = {
    "id": 1,
    "completion": f"```python\n{_ADD}\n```",
    "config": {
        "dataset_type": "CommonOJDataset",
        "language": "python",
        "provided_data": {"test": [{"input": {"stdin": "2 3"}, "output": {"stdout": "5"}}]},
    },
}


def _adapter(service: str, name: str, summary: str, example: Any = None, headers: dict[str, str] | None = None) -> Entry:
    return Entry(f"Clients of {service}", name, example, {}, summary, headers or {})


ENTRIES = {
    "POST /v1/run": Entry(CALLS, "run", {"code": "print(6 * 7)", "limits": {"wall_s": 5}}),
    "POST /v1/batch": Entry(CALLS, "batch", {"calls": [{"code": "print(1)"}, {"code": "print(1 / 0)"}]}),
    "DELETE /v1/calls": Entry(CALLS, "cancel_calls", values={"run": "my-run"}),
    "POST /v1/judge": Entry(JUDGING, "judge", {"code": _ADD, "tests": _TESTS}),
    "POST /v1/verify": Entry(JUDGING, "verify", {"answer": "\\boxed{0.5}", "truth": "\\frac{1}{2}"}),
    "POST /v1/sessions": Entry(SESSIONS, "create_session", {"ttl_s": 600, "auto_checkpoint": True, "tags": {"run": "my-run"}}),
    "GET /v1/sessions": Entry(SESSIONS, "list_sessions", values={"run": "my-run"}),
    "GET /v1/sessions/{id}": Entry(SESSIONS, "get_session"),
    "POST /v1/sessions/{id}/run": Entry(SESSIONS, "run_cell", {"code": "x = 6 * 7\nx"}),
    "POST /v1/sessions/{id}/fork": Entry(SESSIONS, "fork_session", {"n": 2}),
    "POST /v1/sessions/{id}/rollback": Entry(SESSIONS, "roll_back_session", {}),
    "POST /v1/sessions/{id}/interrupt": Entry(SESSIONS, "interrupt_session", {}),
    "PUT /v1/sessions/{id}/files": Entry(SESSIONS, "put_session_files", {"files": {"hello.txt": "aGVsbG8K"}}),
    "GET /v1/sessions/{id}/files": Entry(SESSIONS, "get_session_files", values={"path": "hello.txt"}),
    "DELETE /v1/sessions/{id}": Entry(SESSIONS, "end_session"),
    "POST /v1/jobs": Entry(
        JOBS,
        "submit_job",
        '{"call": {"code": "print(1)"}}\n{"verify": {"answer": "1/2", "truth": "0.5"}}\n',
        values={"name": "my-job"},
    ),
    "GET /v1/jobs": Entry(JOBS, "list_jobs"),
    "GET /v1/jobs/{job}": Entry(JOBS, "get_job"),
    "GET /v1/jobs/{job}/results": Entry(JOBS, "get_job_results"),
    "POST /v1/jobs/{job}/pause": Entry(JOBS, "pause_job"),
    "POST /v1/jobs/{job}/resume": Entry(JOBS, "resume_job"),
    "POST /v1/jobs/{job}/cancel": Entry(JOBS, "cancel_job"),
    "DELETE /v1/jobs/{job}": Entry(JOBS, "remove_job"),
    "GET /v1/info": Entry(SERVICE, "info"),
    "GET /v1/stats": Entry(SERVICE, "stats"),
    "GET /v1/tools": Entry(SERVICE, "tools"),
    "GET /healthz": Entry(SERVICE, "healthz"),
    "GET /readyz": Entry(SERVICE, "readyz"),
    "GET /metrics": Entry(SERVICE, "metrics"),
    "GET /ping": _adapter("code-judge", "code_judge_ping", "Is it there?"),
    "GET /status": _adapter("code-judge", "code_judge_status", "Slots and queue"),
    "POST /run": _adapter("code-judge", "code_judge_run", "Run a submission and return its output", _SUBMISSION),
    "POST /run/batch": _adapter("code-judge", "code_judge_run_batch", "Run submissions", _SUBMISSIONS),
    "POST /run/long-batch": _adapter("code-judge", "code_judge_run_long_batch", "Run many submissions", _SUBMISSIONS),
    "POST /judge": _adapter("code-judge", "code_judge_judge", "Judge a submission", _SUBMISSION),
    "POST /judge/batch": _adapter("code-judge", "code_judge_judge_batch", "Judge submissions", _SUBMISSIONS),
    "POST /judge/long-batch": _adapter("code-judge", "code_judge_judge_long_batch", "Judge many submissions", _SUBMISSIONS),
    "GET /v1/ping": _adapter("SandboxFusion", "sandbox_fusion_ping", "Is it there?"),
    "POST /run_code": _adapter(
        "SandboxFusion", "sandbox_fusion_run_code", "Run a program", {"code": "print(6 * 7)", "language": "python"}
    ),
    "POST /run_jupyter": _adapter(
        "SandboxFusion", "sandbox_fusion_run_jupyter", "Run the cells of a notebook", {"cells": ["x = 6", "x * 7"]}
    ),
    "POST /submit": _adapter("SandboxFusion", "sandbox_fusion_submit", "Judge the code of a completion", _SUBMIT),
    "POST /execute": _adapter(
        *("NeMo-Skills", "nemo_skills_execute", "Run a program, or with X-Session-ID a cell"),
        {"generated_code": "print(6 * 7)", "language": "python"},
    ),
    "GET /health": _adapter("NeMo-Skills", "nemo_skills_health", "Is it there?"),
    "GET /sessions": _adapter("NeMo-Skills", "nemo_skills_sessions", "The sessions of these clients"),
    "DELETE /sessions/{id}": _adapter("NeMo-Skills", "nemo_skills_end_session", "End a session"),
    "POST /api/v2/execute": _adapter(
        *("Piston", "piston_execute", "Run a program"),
        {"language": "python", "version": "*", "files": [{"content": "print(6 * 7)"}]},
    ),
    "GET /api/v2/runtimes": _adapter("Piston", "piston_runtimes", "The languages"),
    "POST /mcp": _adapter(
        *("MCP", "mcp", "A JSON-RPC message of MCP over streamable HTTP", _MCP_CALL),
        {"accept": "application/json, text/event-stream"},
    ),
}
