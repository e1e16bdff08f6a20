"""Programs that measure for NOTES.md and docs/. Not in the wheel; nothing imports them."""
