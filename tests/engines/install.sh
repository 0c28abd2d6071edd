#!/bin/sh
# Makes .venvs/engines: vLLM for CPUs, and SmolLM2-135M-Instruct as a Hugging Face folder (2.4 GB; a second run takes no time).
# torch must be a CPU build. Where the index offers only CUDA builds, name the other index by PIP_EXTRA_INDEX_URL.
set -eu
cd "$(dirname "$0")"
venv=../../.venvs/engines
wanted=$(cat requirements.txt dequantize.py | cksum)
[ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ] || exit 0
echo "installing vLLM into .venvs/engines (minutes)" >&2
"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.txt
"$venv/bin/python" dequantize.py "$venv/smollm2"
printf '%s\n' "$wanted" > "$venv/installed"
