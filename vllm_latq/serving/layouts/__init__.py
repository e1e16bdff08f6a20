"""What a served weight looks like on each device, and its product. As `serving`."""
