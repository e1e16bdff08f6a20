"""The rANS code of latq. Imports `coding`."""
