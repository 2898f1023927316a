"""``python -m stepwell.replay``: see ``cli``.  (Worker processes cannot import what a ``__main__`` defines.)"""

import sys

from stepwell.replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
