#!/bin/sh
# Look at a running service, and drain it without losing a call. For platform engineers.
#   sh examples/operate.sh [URL] [PID]     PID: of `exec-service up`, to drain it at the end; leave it out to only look
# In a cluster metrics have a port of their own: METRICS_URL=http://127.0.0.1:9090 sh examples/operate.sh URL
# A service with keys needs the key of an operator in EXEC_API_KEY (exec-service keys add --operator).
set -eu
url=${1:-http://127.0.0.1:8080}
pid=${2:-}
ask() { curl -sS --fail-with-body ${EXEC_API_KEY:+-H "authorization: Bearer $EXEC_API_KEY"} "$@"; }

echo "Alive (liveness probe), and able to run programs (readiness probe):"
ask "$url/healthz"; echo
ask "$url/readyz"; echo

echo "Capacity and isolation:"
ask "$url/v1/info" | python3 -c '
import json, sys
info = json.load(sys.stdin)
print("  tier {tier}, {workers} worker(s), {slots} slots, version {version}".format(**info))'

echo "Metrics that tell whether it keeps up (Prometheus scrapes all of them from /metrics):"
ask "${METRICS_URL:-$url}/metrics" | grep -E '^exec_(in_flight|waiting|slots|queue_up|queue_oldest_seconds|task_failures_total)[ {]'

echo "The last two minutes:"
ask "$url/v1/stats" | python3 -c '
import json, sys
stats = json.load(sys.stdin)
print("  {:.1f} calls/s, p99 {} ms".format(stats["calls_per_s"], stats["latency_ms"].get("total", {}).get("p99", 0)))
print("  failures of the service:", sum(failure["blame"] == "infra" for failure in stats["failures"]))'

[ -n "$pid" ] || exit 0
echo "Drain: SIGTERM refuses new calls with 503 and finishes the accepted ones."
result=$(mktemp)
trap 'rm -f "$result"' EXIT
ask "$url/v1/run" -H 'content-type: application/json' \
    -d '{"code": "import time; time.sleep(3); print(\"accepted before the drain, and finished\")"}' > "$result" &
call=$!
sleep 1
kill -TERM "$pid"
sleep 1
echo "  a new call: HTTP $(curl -s -o /dev/null -w '%{http_code}' "$url/v1/run" -H 'content-type: application/json' -d '{"code": ""}')"
wait "$call"
python3 -c 'import json, sys; print("  the accepted call:", json.load(open(sys.argv[1]))["stdout"].strip())' "$result"
