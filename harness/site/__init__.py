"""The static page: its parts fetched, built and served."""
