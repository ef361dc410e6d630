"""What a change would make of a recorded step: its dependency graph, replayed, transformed, and replayed again."""

from trine.optim.plan.whatif.predict import Interval, Recorded, WhatIf, recorded, replayed, what_if

__all__ = ["Interval", "Recorded", "WhatIf", "recorded", "replayed", "what_if"]
