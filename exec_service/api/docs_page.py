"""`/docs`: the OpenAPI document as one plain page without scripts. FastAPI's own page loads scripts from a CDN; this one must
work without a network."""

from collections.abc import Iterator
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc }
code { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; width: 100% }
td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0 }
tr + tr { border-top: 1px solid #eee }
a { color: #0645ad }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 }
  tr + tr { border-color: #333 }
  a { color: #8ab4f8 }
}
"""


def docs_page(document: dict[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    body = [
        f"<h1>{title}</h1>",
        f"<p>{escape(document['info'].get('description', ''))}</p>",
        '<p>For machines: <a href="/openapi.json">openapi.json</a></p>',
        "<h2>Routes</h2>",
        *_routes(document["paths"]),
        "<h2>Messages</h2>",
        *_messages(document["components"]["schemas"]),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _routes(paths: dict[str, Any]) -> Iterator[str]:
    for path, verbs in paths.items():
        for verb, operation in verbs.items():
            yield f"<h3>{verb.upper()} <code>{escape(path)}</code></h3>"
            yield f"<p>{escape(operation.get('summary', ''))}</p>"
            yield _table(_route_rows(operation))


def _route_rows(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for parameter in operation.get("parameters", []):
        yield f"<code>?{escape(parameter['name'])}</code>", escape(parameter.get("description", ""))
    if "requestBody" in operation:
        yield "body", _contents(operation["requestBody"])
    for status, response in operation["responses"].items():
        yield escape(status), f"{escape(response.get('description', ''))} {_contents(response)}"


def _contents(holder: dict[str, Any]) -> str:
    return ", ".join(
        f"<code>{escape(kind)}</code> {_type(content.get('schema', {}))}" for kind, content in holder.get("content", {}).items()
    )


def _messages(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        required = schema.get("required", [])
        yield _table(
            (f"<code>{escape(field)}</code>{' (required)' if field in required else ''}", _type(detail))
            for field, detail in schema.get("properties", {}).items()
        )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " ".join(f"<code>{escape(str(one) or repr(one))}</code>" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(" ".join([str(schema.get("type", "")), *_bounds(schema)]))


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    labels = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤", "maxLength": "length ≤", "default": "· default"}
    for key, label in labels.items():
        if key in schema:
            yield f"{label} {schema[key]!r}"


def _table(rows: Iterator[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{left}</td><td>{right}</td></tr>" for left, right in rows) + "</table>"
