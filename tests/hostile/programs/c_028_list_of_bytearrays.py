# C 28: a list that grows for ever
# expect: status=memory_limit blame=model
# without cgroup: status=memory_limit|error
held = []
while True:
    held.append(bytearray(4 << 20))
