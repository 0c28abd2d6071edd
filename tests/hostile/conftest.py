import sys
from pathlib import Path

# The machine seen from outside is the same for a worker and for its corpus.
sys.path.append(str(Path(__file__).parents[1] / "worker"))
