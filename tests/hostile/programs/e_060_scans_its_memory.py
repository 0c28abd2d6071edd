# E 60: looks through all of its memory for marks of an earlier call
# expect: status=ok
# limits: memory_mb=512 wall_s=10
# after: e_060_call_with_a_mark.py
half = b"60-KRAM-YROMEM"
hits = 0
try:
    maps, memory = open("/proc/self/maps"), open("/proc/self/mem", "rb", 0)
except OSError:
    print("contained")  # no /proc at all
    raise SystemExit
for line in maps:
    where, rights = line.split()[:2]
    if "r" not in rights or "[v" in line:
        continue
    start, end = (int(number, 16) for number in where.split("-"))
    while start < end:
        memory.seek(start)
        try:
            data = memory.read(min(end - start, 8 << 20))
        except (OSError, OverflowError):
            break
        hits += data.count(half[::-1])
        start += len(data) or end
# The pattern itself, made above, is found a few times; the earlier call made ten thousand.
print("contained" if hits < 50 else f"escaped: {hits} marks")
