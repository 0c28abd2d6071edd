#!/bin/sh
# The whole suite: the trainer's part beside the rest, most of which waits. With arguments: pytest with these.
# What fails is tried once more and named in the end: the machine may have been busy.
pytest="${BIN:-.venv/bin}/pytest -q --reruns 1 -rR"
if [ $# -gt 0 ]; then
    exec $pytest "$@"
fi
beside=$(mktemp)
trap 'rm -f "$beside"' EXIT
$pytest tests/trainer tests/trainer_integrations >"$beside" 2>&1 &
trainer=$!
trap 'kill -INT $trainer 2>/dev/null; wait $trainer; rm -f "$beside"; exit 130' INT TERM
$pytest --ignore=tests/trainer --ignore=tests/trainer_integrations
rest=$?
echo "the trainer's tests:"
wait $trainer
failed=$?
trap - INT TERM
cat "$beside"
[ $rest -eq 0 ] && [ $failed -eq 0 ]
