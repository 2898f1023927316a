"""Comparisons: arms run in turns in one browser, and ratios paired round by round."""
