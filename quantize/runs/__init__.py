"""The run that writes a checkpoint. Imports `allocation` and below."""
