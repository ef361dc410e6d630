"""Where a step ends: decided from what was seen of the loop, without touching it."""

from __future__ import annotations

from typing import Literal

__all__ = ["PATIENCE_KNOWN", "PATIENCE_UNKNOWN", "Progress"]

#: Batches with a backward and without an optimizer step before each batch counts as a step of its own: with no
#: optimizer known (an update written by hand), and with one that was given but was never seen to step.
PATIENCE_UNKNOWN = 64
PATIENCE_KNOWN = 512


class Progress:
    """Counts steps. A step is one part (batch), or several when their gradients wait for one optimizer step.

    ``index`` is of the step that is open or comes next, ``pending`` its parts so far.
    """

    def __init__(self) -> None:
        self.index = 0
        self.pending = 0
        #: The optimizer has stepped in the open part.
        self.stepped = False
        self.optimizer_steps = 0
        #: An engine says where its steps are, and has said that this one ended.
        self.engine = False
        self.engine_ended = False
        self._patient = True

    def begin(self) -> None:
        """A part opens."""
        self.stepped = self.engine_ended = False

    def optimizer_stepped(self) -> None:
        """The step may end with this part."""
        self.stepped = True
        self.optimizer_steps += 1
        self._patient = True

    def ends_step(
        self, *, has_backward: bool, updated: bool, knows_optimizer: bool
    ) -> tuple[bool, Literal["", "guessed"]]:
        """Whether the open part ends its step, and whether that is a guess.

        ``has_backward``: gradients were added to in this part. ``updated``: a parameter changed in place, which tells of
        updates that no hook of ``torch.optim`` sees (a compiled optimizer step, an update by hand).
        ``knows_optimizer``: one was given, so that waiting for its step makes sense.
        """
        if self.engine:
            return self.engine_ended, ""
        if self.stepped or updated:
            return True, ""
        if not has_backward:
            # A batch without training is a step, unless gradients of batches before it wait for the optimizer.
            return self.pending == 0, ""
        known = knows_optimizer or self.optimizer_steps > 0
        if self._patient and self.pending + 1 < (PATIENCE_KNOWN if known else PATIENCE_UNKNOWN):
            return False, ""
        first, self._patient = self._patient, False
        return True, "guessed" if first else ""

    def end(self, complete: bool) -> None:
        """The open part has closed."""
        if complete:
            self.pending = 0
            self.index += 1
        else:
            self.pending += 1
