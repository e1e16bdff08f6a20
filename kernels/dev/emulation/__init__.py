"""An emulator of PTX that runs the compiled kernels. Not in the wheel."""
