# F 77: removes all that it can
# expect: status=ok|timeout|error
# needs: landlock|mntns
# limits: wall_s=1.5
import shutil

print("contained", flush=True)
shutil.rmtree("/", ignore_errors=True)
