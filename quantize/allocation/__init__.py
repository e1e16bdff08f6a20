"""How many bits each input gets. Imports `methods`, `calibration`, `model` and below."""
