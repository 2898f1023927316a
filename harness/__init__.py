"""Builds the site, serves it, and drives it in Chrome: ``python -m harness --help``."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

DIST = ROOT / "dist"
"""Where the built site goes."""

CACHE = ROOT / ".stepwell"
"""Downloads and built wheels; deleting it only costs time."""
