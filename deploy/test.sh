#!/bin/sh
# The whole suite, or with arguments: pytest with these. Most tests wait rather than compute, so several run at the same time: the
# trainer's in one process, the others in two for every core. First and one by one those marked `alone`, which look at the
# whole machine. A test that hangs fails after 10 minutes and shows where. TRAINER=no leaves out the trainer's.
pytest="${BIN:-.venv/bin}/pytest -q"
without="--ignore=tests/trainer --ignore=tests/trainer_integrations"
if [ $# -gt 0 ]; then
    [ "${TRAINER:-yes}" = yes ] || exec $pytest $without "$@"
    exec $pytest "$@"
fi
pytest="$pytest --timeout 600"
folder=$(mktemp -d)
trainer=
stop() { [ -z "$trainer" ] || { kill -INT $trainer 2>/dev/null; wait $trainer; }; exit 130; }
trap 'rm -rf "$folder"' EXIT
trap stop INT TERM

echo "tests that have to be alone:"
$pytest -m alone $(grep -rl --include='test_*.py' 'mark\.alone' tests)  # to collect all would take longer than to run these
alone=$?
if [ "${TRAINER:-yes}" = yes ]; then
    $pytest tests/trainer tests/trainer_integrations >"$folder/trainer" 2>&1 &
    trainer=$!
fi
echo "all others:"
$pytest $without -m "not alone" --dist loadfile -n $((2 * $(nproc)))
others=$?
with_trainer=0
if [ -n "$trainer" ]; then
    wait $trainer
    with_trainer=$?
    echo "the trainer's:"
    cat "$folder/trainer"
fi
[ $alone -eq 0 ] || echo "FAILED: tests that have to be alone, see the top"
[ $others -eq 0 ] || echo "FAILED: others, see above"
[ $alone -eq 0 ] && [ $others -eq 0 ] && [ $with_trainer -eq 0 ]
