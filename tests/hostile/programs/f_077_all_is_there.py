# F 77: works as before, after another program removed all that it could
# expect: status=ok
# needs: landlock|mntns
# after: f_077_removes_everything.py
import json
import os
import subprocess
import tempfile

with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
with open("/dev/null", "w") as null:
    null.write("x")
words = subprocess.run(["sh", "-c", "echo whole; ls /usr/bin | head -1"], capture_output=True, text=True).stdout
print("contained" if words.startswith("whole\n") and os.path.exists(json.__file__) else words)
