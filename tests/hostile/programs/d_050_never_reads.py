# D 50: does not read 10 MB of stdin
# expect: status=ok
# stdin_mb: 10
print("contained")
