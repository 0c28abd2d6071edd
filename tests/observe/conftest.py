import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("worker", "service", "web")]
