"""Names of what the lattice offers, as options give them. Imports nothing, so that `latq --help` needs no torch."""

ORDERS = ("natural", "act", "min-pivot")
ROUNDINGS = ("nearest", "stochastic")
REDUCTIONS = ("none", "lll")
SCALE_METHODS = ("mse", "absmax", "signed")
TARGETS = ("quantized", "original", "residual")
