"""What generates tokens: in this process (`local`) or over HTTP (`vllm`, `sglang`), behind one protocol (`base`)."""
