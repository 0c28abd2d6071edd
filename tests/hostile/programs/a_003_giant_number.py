# A 3: one call into C that runs for minutes and looks at no signal
# expect: status=timeout
# limits: wall_s=0.5 memory_mb=512
str(10**10**8)
