"""Checks without a GPU: reference, audit of machine code, traffic. Not in the wheel; nothing imports it."""
