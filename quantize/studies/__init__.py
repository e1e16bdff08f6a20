"""Programs that measure for NOTES.md and README. Not in the wheel; nothing imports them."""
