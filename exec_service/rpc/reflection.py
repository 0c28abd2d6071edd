"""gRPC reflection: tells callers which services and messages are here."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from exec_wire import proto


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """For callers with a key, where keys are required: it reads messages as large as calls. `check` aborts the others."""

    def __init__(self, names: Sequence[str], pool: Any, check: Callable[[Any], Awaitable[None]]) -> None:
        super().__init__(names, pool)
        self._check = check

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(context)
        async for answer in super().ServerReflectionInfo(request_iterator, context):
            yield answer


def served() -> Any:
    """Everything that is served here, for reflection."""
    pool = descriptor_pool.DescriptorPool()
    for file in (proto.FILE, health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb):
        pool.AddSerializedFile(file)
    return pool
