"""The public door: its names, its errors, its examples."""

import ast
import asyncio
import contextlib
import copy
import doctest
import importlib
import inspect
import io
import pickle
import pkgutil
import subprocess
import sys
import traceback

import pytest

import exec_client
from exec_client import CallFields, ExecError, JudgeFields, VerifyFields, errors
from exec_wire import Call, Judge, Judgement, Result, Verdict, Verification, Verify, encode_json

from .scripted_server import Exchange, ScriptedServer, decode_judge, decode_verify_batch, line

PUBLIC = """
    DEFAULT_URL AsyncClient AsyncSession BadRequest Call CallFields CallerError CellFields Checker Client ClientClosed
    Conflict ConnectionFailed DeadlineExceeded ExecError Forbidden HttpTransport Info InfraFailure Judge JudgeFields
    Judgement Limits NotReady Overloaded Policy ProtocolError Result ServiceFailed Session SessionFields SessionInfo
    SessionLost Tags Test TooLarge Transport Unavailable UnknownArgument UsageError Verdict Verification Verify VerifyFields
    WrongEventLoop
""".split()
MODULES = ["aio", "errors", "judging", "sessions", "sync"]


def test_public_names_are_these_and_no_others() -> None:
    assert exec_client.__all__ == PUBLIC
    assert all(hasattr(exec_client, name) for name in PUBLIC)
    modules = [module.name for module in pkgutil.iter_modules(exec_client.__path__)]
    assert sorted(name for name in modules if not name.startswith("_")) == MODULES


def test_every_error_is_public_and_drawn_in_the_tree() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ExecError)}
    drawn = [
        text.lstrip(" │├└─") for text in (errors.__doc__ or "").splitlines() if "─ " in text or text.startswith("ExecError")
    ]
    assert sorted(kind.__name__ for kind in kinds) == sorted(text.split()[0] for text in drawn)
    assert {kind.__name__ for kind in kinds} <= set(exec_client.__all__)


def test_keywords_are_the_fields_of_the_messages() -> None:
    assert set(CallFields.__annotations__) == set(Call.__struct_fields__) - {"code"}
    assert set(JudgeFields.__annotations__) == set(Judge.__struct_fields__) - {"code", "tests"}
    assert set(VerifyFields.__annotations__) == set(Verify.__struct_fields__) - {"answer", "truth"}


@pytest.mark.parametrize(
    "error",
    [
        exec_client.BadRequest("m", code="bad_field", field="$.code", status=422, request_id="r"),
        exec_client.Overloaded("m", retry_after_s=1.5),
        exec_client.ConnectionFailed("m", sent=False),
        exec_client.InfraFailure("m", result=Result("worker_lost", blame="infra")),
        exec_client.ProtocolError("m", retryable=True),
        exec_client.ClientClosed("m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickle_and_copy(error: ExecError) -> None:
    error.index = 7
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error)
        assert (str(same), vars(same)) == (str(error), vars(error))


def test_installing_the_client_needs_httpx_and_msgspec_only() -> None:
    program = """if True:
        import sys
        servers = ("fastapi", "starlette", "uvicorn", "uvloop", "redis", "pydantic", "grpc", "google")
        for name in (*servers, "exec_service", "worker"):
            sys.modules[name] = None
        before = set(sys.modules)
        import exec_client, threading
        assert threading.active_count() == 1
        tops = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        print(" ".join(sorted(tops & {"exec_client", "exec_wire", "httpx", "msgspec"})))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["exec_client", "exec_wire", "httpx", "msgspec"]


def examples() -> list[doctest.DocTest]:
    modules = [importlib.import_module(f"exec_client{name}") for name in ("", ".aio", ".sync")]
    finder = doctest.DocTestFinder()
    return [test for module in modules for test in finder.find(module, extraglobs=vars(exec_client)) if test.examples]


def run_program(call: Call) -> Result:
    """The examples' programs are harmless, so that plain `exec` will do."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(call.code, {"input": lambda: call.stdin})
    except Exception:
        return Result("error", "model", id=call.id, stdout=out.getvalue(), stderr=traceback.format_exc())
    return Result("ok", id=call.id, stdout=out.getvalue())


def judge_program(judge: Judge) -> Judgement:
    results = [run_program(Call(judge.code, stdin=test.stdin)) for test in judge.tests]
    same = [result.stdout.split() == test.expected.split() for result, test in zip(results, judge.tests, strict=True)]
    verdicts = [Verdict(index, "AC" if equal else "WA") for index, equal in enumerate(same)]
    return Judgement("AC" if all(same) else "WA", sum(same) / len(same), sum(same), len(same), verdicts)


async def run_programs(exchange: Exchange) -> None:
    if exchange.path == "/v1/judge":
        return await exchange.json(judge_program(decode_judge(exchange.body)))
    await exchange.start()
    if exchange.path == "/v1/verify":
        for index, item in enumerate(decode_verify_batch(exchange.body).items):
            equal = item.answer == item.truth if item.kind == "numeric" else True
            await exchange.write(encode_json(Verification(equal, index=index)) + b"\n")
        return await exchange.end()
    for index, call in enumerate(exchange.calls):
        result = run_program(call)
        result.index = index
        await exchange.write(line(result))
    await exchange.end()


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_examples_in_docstrings_run(test: doctest.DocTest, server: ScriptedServer) -> None:
    server.play(ever_after=run_programs)
    loop = asyncio.new_event_loop()
    for example in test.examples:
        source = example.source.replace("Client()", f"Client({server.url!r})")
        assert evaluate(source, test.globs, loop) == example.want, example.source
    loop.close()


def evaluate(source: str, names: dict[str, object], loop: asyncio.AbstractEventLoop) -> str:
    """What a prompt with top-level await, such as `python -m asyncio`, would show."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        pending = eval(code, names)
        if inspect.iscoroutine(pending):
            loop.run_until_complete(pending)
    return out.getvalue()


def test_examples_were_found() -> None:
    assert len(examples()) >= 8
