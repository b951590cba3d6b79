"""``python -m elastic_runner`` is the command line."""

import sys

from elastic_runner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
