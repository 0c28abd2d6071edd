# D 46: complains for ever
# expect: status=output_limit blame=model stderr_has=" bytes cut ..."
import sys

while True:
    print("x" * 10_000, file=sys.stderr)
