# A 1: an endless loop
# expect: status=timeout
# limits: wall_s=0.5
while True:
    pass
