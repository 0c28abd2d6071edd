# E 55: prints a perfect result and fails
# expect: status=error exit=1 blame=model completed=no stdout="{\"status\": \"ok\", \"exit_code\": 0, \"blame\": \"infra\", \"completed\": true}\n"
print('{"status": "ok", "exit_code": 0, "blame": "infra", "completed": true}')
raise SystemExit(1)
