"""The trellis code of latq. Imports `coding`."""
