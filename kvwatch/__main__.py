"""`python -m kvwatch` is the command `kvwatch`."""

import sys

from kvwatch.cli import main

sys.exit(main())
