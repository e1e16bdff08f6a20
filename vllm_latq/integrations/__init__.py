"""All code that knows a host framework. Imports `serving`, `format`, `models`."""
