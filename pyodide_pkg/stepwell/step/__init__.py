"""A decode step as plain data: what will be launched and copied, before any GPU object exists.

``recorder.py`` has ``Recorder``, whose methods a model's code calls, and the ``Step`` that it gives; ``shapes.py`` has
the shape classes by which steps of similar sizes share kernels and workspaces.
"""
