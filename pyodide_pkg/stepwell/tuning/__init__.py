"""Times a model's products on the adapter at hand, and remembers the fastest tilings.

``await Autotuner(model, launcher, budget_ms).run(progress)`` (``autotune.py``) times the products of the decode step on
the model's own weights and gives a ``TuningOutcome``; ``candidates.py`` lists the tilings that are worth a try, and
``remembered.py`` keeps what was found, as text and as the table that goes before the rules.  docs/tuning.md has the
method and its reasons.
"""
