"""The page driven in a browser: one run in, one record out."""
