"""The commands of ``python -m harness``, and what they print."""
