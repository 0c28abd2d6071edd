import sys
from pathlib import Path

# The scripted worker and the served gateway are the same as everywhere; so is the real server.
for folder in ("gateway", "cluster", "worker"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
