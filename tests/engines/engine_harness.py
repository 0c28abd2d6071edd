"""A vLLM server in a process of its own, and the settings of the toy that it serves."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

import httpx
from trainer_harness import with_settings

from grpo_roc import config
from loadtest.support.processes import free_port

VENV = Path(os.environ["EXEC_ENGINES"]).resolve()
SMOLLM2 = VENV / "smollm2"
PATIENCE_S = 900
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parent / "gloo_plugin"),
}
# vLLM for CPUs dies when it computes a prompt in two parts, as of many requests at once, and the request has a seed.
SEEDED = ("--no-enable-chunked-prefill",)
# vLLM's attention on CPUs needs heads of 32 and more.
TOY = with_settings(
    "model.hidden=128", "engines=[{max_len: 1024}]", "rl.lockstep=false", "rl.lr=1e-4", "rl.warmup=1", "scheduler.check_s=2"
)


def at(service_url: str, engines: list[str], *changes: str, base: config.Config = TOY) -> config.Config:
    urls = ", ".join(f"{{kind: vllm, url: '{url}', max_len: 1024}}" for url in engines)
    return with_settings(f"service.url={service_url}", f"engines=[{urls}]", *changes, base=base)


class Vllm:
    def __init__(self, model: Path, logs: Path, *arguments: str, nice: int = 10) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = logs / "vllm.log"
        # The `vllm` command asks for the metadata of a distribution named vllm, which the wheel for CPUs does not have.
        self._command = ["nice", "-n", str(nice), str(VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(self.port), "--enable-scale-out"]
        self._command += ["--enforce-eager", "--max-model-len", "1024", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=VENV,
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self._healthy():
            assert self._process is not None and self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.5)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=10, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def sleeps(self) -> bool:
        return bool(httpx.get(f"{self.url}/is_sleeping", timeout=60, trust_env=False).json()["is_sleeping"])

    def label(self) -> str:
        """Of the weights that it has."""
        return str(httpx.get(f"{self.url}/weight_info", timeout=60, trust_env=False).json()["weight_version"])

    def cpu_s(self) -> float:
        """Of all its processes, which are one session."""
        assert self._process is not None
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """All its processes at once, as a lost machine does."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
