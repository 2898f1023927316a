"""A decode step as plain data: what is to be launched and copied, before any GPU object exists."""
