"""Describes the answers of a route for OpenAPI."""

from typing import Any

import msgspec
from msgspec import Struct

from exec_wire.problems import CONTENT_TYPE, PROBLEMS, Problem

REF = "#/components/schemas/{name}"


def schema_of(message: type[Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=message.__name__)}


def answers(message: type[Struct], *problem_codes: str) -> dict[int | str, dict[str, Any]]:
    """Status 200 with this message, and the problems by HTTP status."""
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "OK", "content": {"application/json": {"schema": schema_of(message)}}}
    }
    for code in sorted(problem_codes, key=lambda code: PROBLEMS[code][0]):
        status, title = PROBLEMS[code]
        known = responses.setdefault(status, {"description": "", "content": {CONTENT_TYPE: {"schema": schema_of(Problem)}}})
        known["description"] = "; ".join(part for part in (known["description"], f"{code}: {title}") if part)
    return responses


def query_parameters(message: type[Struct]) -> list[dict[str, Any]]:
    """The fields of a message as query parameters."""
    _, schemas = msgspec.json.schema_components([message], ref_template=REF)
    properties = schemas[message.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
