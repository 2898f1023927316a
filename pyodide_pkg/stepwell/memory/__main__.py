"""An alias: ``python -m stepwell.memory`` is now ``python -m stepwell.replay``, and says so."""

import sys
from runpy import run_module

if __name__ == "__main__":
    sys.stderr.write("python -m stepwell.memory is now python -m stepwell.replay; both run the same commands.\n")
    run_module("stepwell.replay", run_name="__main__")
