import sys

from loadtest.bench.measure import main

sys.exit(main())
