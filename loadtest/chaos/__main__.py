import sys

from loadtest.chaos.run import main
from loadtest.support.processes import exit_on_sigterm

exit_on_sigterm()
sys.exit(main())
