"""Where things are in a checkout: tests name files by these, wherever they stand themselves."""

from harness import ROOT

__all__ = ["DATA", "ROOT", "SUPPORT"]

DATA = ROOT / "tests" / "data"
"""Reference data: figures computed elsewhere."""

SUPPORT = ROOT / "tests" / "support"
"""JavaScript that tests load, and what they share."""
