"""The layout of a served weight on each device, and its product. As `serving`."""
