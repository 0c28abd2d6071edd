# D 45: prints for ever
# expect: status=output_limit blame=model stdout_has=" bytes cut ..."
while True:
    print("x" * 10_000)
