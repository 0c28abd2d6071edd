# D 47: a hundred thousand single bytes to each stream in turn
# expect: status=ok
# limits: output_kb=256 wall_s=10
import os

for _ in range(100_000):
    os.write(1, b"o")
    os.write(2, b"e")
print("\ncontained")
