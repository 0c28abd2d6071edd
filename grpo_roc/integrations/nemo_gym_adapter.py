"""NeMo Gym 0.4: a resources server with `POST /execute_python`; `verify` scores the last message.

A row of the data set has `expected_answer` beside `responses_create_params`, as in Gym's own math environments.
"""

from typing import Any

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from pydantic import BaseModel

from grpo_roc import chat
from grpo_roc.integrations import service


class ExecuteRequest(BaseModel):
    code: str
    input: str = ""


class ExecuteResponse(BaseModel):
    output: str
    status: str
    outcome: str


class VerifyRequest(BaseVerifyRequest):
    expected_answer: str | int


class VerifyResponse(BaseVerifyResponse):
    expected_answer: str | int
    unknown: bool  # the service could not verify the answer: the reward is no measurement


class ExecResourcesServer(SimpleResourcesServer):
    def setup_webserver(self) -> Any:
        app = super().setup_webserver()
        app.post("/execute_python")(self.execute_python)
        return app

    async def execute_python(self, body: ExecuteRequest) -> ExecuteResponse:
        found = await service.run(body.code, body.input)
        return ExecuteResponse(output=found.text, status=found.status, outcome=found.outcome)

    async def verify(self, body: VerifyRequest) -> VerifyResponse:
        messages = [item for item in body.response.output if item.type == "message"]
        text = "".join(getattr(part, "text", "") for part in messages[-1].content) if messages else ""
        score = await service.verify(chat.final_answer(text) or text, str(body.expected_answer))
        return VerifyResponse(**body.model_dump(), reward=score or 0.0, unknown=score is None)
