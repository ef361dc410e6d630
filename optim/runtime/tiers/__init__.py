"""Training state that lives off the device: files with checksums, tiles of the optimizer step, blocks' parameters, the plan.

files        a nameless file: mapped for whoever reads it, checked at every read of ours
spans        how a step is cut into tiles; pure arithmetic
slots        what the optimizer holds, and where each part of it lies
parts, slabs what a tile is made of, and the memory of those in flight
tiled_step   the optimizer's own step, tile by tile, with transfers beside it
block_parameters   parameters that are on the device around their block's forward and backward alone
plan         which bytes lie on which tier, by heat; pure arithmetic. planning: of a run
install      from a configuration to all of these
"""

from __future__ import annotations
