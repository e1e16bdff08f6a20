"""From text to Hessians and gradients. Imports `model`, `lattice`, `machine`, `recipe`."""
