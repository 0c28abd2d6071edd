import sys
from pathlib import Path

# The measurements are not installed: they run from a checkout.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
