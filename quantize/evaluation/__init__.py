"""How good a model is. Imports `calibration` for text, `model` for loading."""
