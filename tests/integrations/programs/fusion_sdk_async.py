"""The asynchronous half of SandboxFusion's SDK."""

import asyncio
import sys

import sandbox_fusion as sf

sf.set_endpoint(sys.argv[1])


async def main() -> None:
    requests = [sf.RunCodeRequest(code=f"print({n})", language="python") for n in range(40)]
    made = await asyncio.gather(*(sf.run_code_async(request) for request in requests))
    assert [one.run_result.stdout for one in made] == [f"{n}\n" for n in range(40)]
    notebook = await sf.run_jupyter_async(sf.RunJupyterRequest(cells=["x = 1", "x"]))
    assert notebook.cells[1].display == [{"text/plain": "1"}]


asyncio.run(main())
print("all as expected")
