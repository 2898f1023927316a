"""How a recorded step reaches the GPU: one program of integers, or the replay of a plan.

``launcher.py`` has ``Launcher``, which owns the caches of one device and pool; ``context.py`` is what its parts
share.  ``assembly.py`` turns a step into programs, ``parameters.py`` has the slots of scalars and what is known to be
in them, ``bind_groups.py`` and ``kernel_cache.py`` are the bounded caches, ``compiler.py`` compiles, ``plan.py`` and
``verify.py`` have the plans, ``counters.py`` the counts and ``spans.py`` the Chrome traces.  ``options.py`` has the
switches and the arms of the ablation, ``selection.py`` which kernels an adapter gets. docs/launch.md says what each
is for and saves.
"""
