"""`python -m kvwatch_dashboards.local`: an engine with Prometheus and Alertmanager on this machine."""

import sys

from kvwatch_dashboards.local.observatory import main

if __name__ == "__main__":
    sys.exit(main())
