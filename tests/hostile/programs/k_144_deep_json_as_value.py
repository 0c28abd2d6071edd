# K 144: what its session leaves as the value of its cell is JSON that is nested deep
# expect: status=ok
# expect-cell: status=signal signal=9 blame=model
import json

plain = json.dumps
json.dumps = lambda said: "[" * 100_000 if "value" in said else plain(said)
print("contained")
