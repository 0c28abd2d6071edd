"""The HTTP endpoints of judging and verifying: decode, run, encode."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
from msgspec.structs import replace
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from exec_service.api.calls import Endpoint
from exec_service.api.middleware import RequestFacts
from exec_service.api.streaming import cancel_on_disconnect, or_keep_alive
from exec_service.api.validation import VERIFY, Validator, Warnings, read
from exec_service.config import GatewayConfig
from exec_service.dispatch.call_group import CallGroup, places
from exec_service.dispatch.dispatch import Dispatch
from exec_service.judging.judge import Judging, bytes_of
from exec_service.judging.verify import bytes_of as bytes_of_verify
from exec_service.judging.verify import verify
from exec_service.refusals import Refusal
from exec_service.sessions import permitted
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Limits, encode_json
from exec_wire.messages.judging import Judge, Verification, Verify
from exec_wire.supervisor import stop

_encode_lines = msgspec.json.Encoder().encode_lines
LINES_PER_WRITE = 64  # each has at most about 1,500 characters


class JudgeEndpoint(Endpoint):
    """`POST /v1/judge`: a Judge in, its Judgement out."""

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        warnings: Warnings = {}
        judge = self._validator.read_judge(await self._read(scope, facts, receive), warnings)
        if (account := facts.origin.account) is not None:
            judge = permit_judge(judge, account)
        bytes_ = bytes_of(judge, places(self._dispatch))
        if bytes_ > self._config.max_bytes:  # admission could never take it
            raise Refusal("body_too_large", f"the tests take {bytes_} bytes together; the limit is {self._config.max_bytes}")
        with self._dispatch.reserve(len(judge.tests), bytes_, facts.origin) as room:
            facts.calls = len(judge.tests)
            group = CallGroup(self._dispatch, room, facts.origin)
            judgement = await cancel_on_disconnect(Judging(judge, group).judge(), scope)
            judgement.warnings = warnings.get(0, [])
            await self._send_json(encode_json(judgement), send)


class VerifyEndpoint(Endpoint):
    """`POST /v1/verify`: a Verify in, its Verification out; or `{"items": […]}` in, and each Verification when it is ready."""

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        body = await self._read(scope, facts, receive)
        warnings: Warnings = {}
        if not self._validator.has_items(body):
            item = read(VERIFY, body, warnings)
            permit_verify([item], facts, "$")
            with self._group([item], facts) as group:
                made = await cancel_on_disconnect(verify(item, 0, group), scope)
                made.warnings = warnings.get(0, [])
                await self._send_json(encode_json(made), send)
            return
        items = self._validator.read_verify_batch(body, warnings)
        permit_verify(items, facts, "$.items[{}]")
        with self._group(items, facts) as group:
            await cancel_on_disconnect(self._send_stream(items, warnings, group, send), scope)

    @contextmanager
    def _group(self, items: Sequence[Verify], facts: RequestFacts) -> Iterator[CallGroup]:
        in_sandbox = [item for item in items if item.kind == "math"]
        with self._dispatch.reserve(len(in_sandbox), sum(map(bytes_of_verify, in_sandbox)), facts.origin) as room:
            facts.calls = len(items)
            yield CallGroup(self._dispatch, room, facts.origin)

    async def _send_stream(self, items: Sequence[Verify], warnings: Warnings, group: CallGroup, send: Send) -> None:
        await self._start_stream(send)
        ended: asyncio.Queue[asyncio.Task[Verification]] = asyncio.Queue()
        tasks = [asyncio.create_task(verify(item, index, group)) for index, item in enumerate(items)]
        try:
            for task in tasks:
                task.add_done_callback(ended.put_nowait)
            left = len(items)
            while left:
                ready = [(await or_keep_alive(ended.get, partial(self._write, b"\n", send))).result()]
                while not ended.empty() and len(ready) < LINES_PER_WRITE:
                    ready.append(ended.get_nowait().result())
                left -= len(ready)
                for made in ready if warnings else ():
                    made.warnings = warnings.get(made.index, [])
                await self._write(_encode_lines(ready), send)
        finally:
            await stop(tasks)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def permit_judge(judge: Judge, account: Account) -> Judge:
    account.check_tenant(judge.tenant)
    limits = account.permit_limits(judge.limits)
    tests = [
        test if test.limits is None else replace(test, limits=account.permit_limits(test.limits, at=f".tests[{index}].limits"))
        for index, test in enumerate(judge.tests)
    ]
    if judge.checker.kind == "program":  # it has the default limits, which may be more than the key allows
        for name in account.allowance.max_limits:
            if (usual := getattr(Limits(), name)) is not None:
                account.check_limit(name, usual, ".checker")
    return account.own(replace(judge, limits=limits, tests=tests))


def permit_verify(items: Sequence[Verify], facts: RequestFacts, at: str) -> None:
    """Verification runs the service's own programs; a caller sets only their time."""
    account = facts.origin.account
    if account is None:
        return
    for index, item in enumerate(items):
        with permitted(at.format(index)):
            account.check_tenant(item.tenant)
            account.check_limit("wall_s", item.wall_s, ".wall_s")
        account.own(item)


def judging_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator) -> list[Route]:
    return [
        Route("/v1/judge", JudgeEndpoint(config, dispatch, validator), methods=["POST"], name="judge"),
        Route("/v1/verify", VerifyEndpoint(config, dispatch, validator), methods=["POST"], name="verify"),
    ]
